"""Rows of whole documents, and what a corpus says is supervised in any rows."""

from itertools import pairwise

import numpy as np
import pytest

from data.batch import Batch, Block
from data.rows import DocumentRows, InOrder, PackedRows, TextBatches, WholeRows
from data.text.token_file import TokenFile, TokenFileWriter
from kernels.layouts import Contiguous, Striped, Zigzag, order
from tests.numbered_corpus import (
    NUMBERS,
    assert_same_batch,
    make_corpus,
    naive_row,
    read_rows,
)

LENGTH = 24
PLANS = [PackedRows, WholeRows, DocumentRows]
RINGS = [(Contiguous(), 6), (Contiguous(), 24), (Striped(), 3), (Striped(), 8)]
RINGS += [(Striped(4), 2), (Zigzag(), 4)]


@pytest.fixture
def masked(tmp_path):
    """Documents of up to a row's length, with a loss mask that is drawn."""
    rng = np.random.default_rng(9)
    lengths = [*rng.integers(1, LENGTH + 1, 40), LENGTH, LENGTH, 1, 1]
    with TokenFileWriter(tmp_path / "corpus", NUMBERS, has_loss_mask=True) as writer:
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            tokens = np.arange(end - length, end)
            writer.write("train", tokens, rng.random(length) < 0.5)
    return TokenFile.open(tmp_path / "corpus", "train")


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1, 50, 10_000])
def test_rows_hold_whole_documents_in_order_and_as_many_as_fit(masked, length):
    rows = read_rows(WholeRows(masked, length))
    ends = [*masked.starts[1:].tolist(), masked.tokens.size]
    begin = 0
    for row, following in pairwise([*rows, None]):
        fitting = [end for end in ends if begin < end <= begin + length]
        wanted = naive_row(masked, begin, fitting[-1], length)
        supervised = np.append(masked.loss_mask[:], np.zeros(length))
        weights = wanted.loss_weights * supervised[begin + 1 : begin + length + 1]
        wanted = wanted._replace(loss_weights=weights)
        assert_same_batch(row, wanted)
        begin = fitting[-1]
        assert (following is None) == (begin == masked.tokens.size)


@pytest.mark.parametrize("plan", PLANS)
def test_weights_of_all_rows_are_the_supervised_tokens_that_follow_one(masked, plan):
    rows = read_rows(plan(masked, LENGTH))
    targets = np.concatenate([row.targets[row.loss_weights == 1] for row in rows])
    followers = np.setdiff1d(np.flatnonzero(masked.loss_mask[:]), masked.starts)
    if plan is PackedRows:  # what is left of the last row is not read
        followers = followers[followers <= len(rows) * LENGTH]
    np.testing.assert_array_equal(np.sort(targets), followers)
    weights = np.concatenate([row.loss_weights for row in rows])
    assert set(weights.tolist()) == {0.0, 1.0}
    assert weights.sum() == followers.size > 100


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layout, ring_size", RINGS)
def test_the_mask_survives_every_layout_and_the_cut_into_blocks(
    masked, plan, layout, ring_size
):
    plan = plan(masked, LENGTH)
    shard = LENGTH // ring_size
    columns = [(start, start + shard) for start in range(0, LENGTH, shard)]
    blocks = [Block((r, r + 1), part) for r in range(3) for part in columns]
    batches = TextBatches(plan, blocks, 3, layout, ring_size, InOrder())
    back = np.argsort(order(layout, ring_size, LENGTH))
    wanted = read_rows(plan)
    for step in range(2):
        read = batches[step]
        for row in range(3):
            parts = [read[Block((row, row + 1), part)] for part in columns]
            arrays = zip(*parts, strict=True)
            joined = Batch(*(np.concatenate(a, axis=1)[0, back] for a in arrays))
            assert_same_batch(joined, wanted[3 * step + row])


def test_a_document_longer_than_a_row_is_refused(tmp_path):
    corpus = make_corpus(tmp_path, [3, 9, 4])
    assert WholeRows(corpus, 9).rows == 3
    with pytest.raises(ValueError, match="document 1 of split 'train' .* has 9 tokens"):
        WholeRows(corpus, 8)
