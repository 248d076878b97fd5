"""Texts whose tokens are their own places in the stream, and batches of them."""

from types import SimpleNamespace

import numpy as np

from data.batch import Batch, Block
from data.rows import Shuffled, TextBatches
from data.text.tokens.token_file import TokenFile, TokenFileWriter
from kernels.layouts import Contiguous

# Every token is its own place in the stream, so that no mix-up can go unseen.
NUMBERS = SimpleNamespace(
    name="numbers", path=None, vocab_size=1 << 20, end_of_document=0
)


def make_corpus(directory, lengths):
    """Documents of these lengths, in an empty directory."""
    with TokenFileWriter(directory / "corpus", NUMBERS) as writer:
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            writer.write("train", np.arange(end - length, end))
    return TokenFile.open(directory / "corpus", "train")


def read_rows(plan, index=None):
    """All rows of a plan, or these columns of them."""
    index = np.arange(plan.length, dtype=np.int32) if index is None else index
    return [plan.read(row, index) for row in range(plan.rows)]


def naive_row(corpus, begin, end, length):
    """A row of the stream's tokens from `begin` on, targets before `end`, by a loop."""
    stream, starts = corpus.tokens[:].tolist(), corpus.starts.tolist()
    real = min(length, end - begin)
    row = []
    for index in range(length):
        place = begin + index
        if index >= real:
            row.append((0, 0, 0.0, 0, index, real))
            continue
        start = max(start for start in starts if start <= place)
        k_start = max(start - begin, 0)
        has_successor = place + 1 < end
        target = stream[place + 1] if has_successor else 0
        weight = float(has_successor and place + 1 not in starts)
        row.append((stream[place], target, weight, index - k_start, k_start, index + 1))
    return Batch(*(np.array(column) for column in zip(*row, strict=True)))


def assert_same_batch(got, want, strict=False):
    """Field by field; strict: of the same types too."""
    for name in want._fields:
        mine, others = getattr(got, name), getattr(want, name)
        np.testing.assert_array_equal(mine, others, err_msg=name, strict=strict)


def make_batches(plan, rows=3, layout=None, ring_size=1, row_order=None, blocks=None):
    """Batches of a plan's rows, all of them this host's unless blocks are given."""
    return TextBatches(
        plan,
        [Block((0, rows), (0, plan.length))] if blocks is None else blocks,
        rows,
        layout or Contiguous(),
        ring_size,
        row_order or Shuffled(11),
    )
