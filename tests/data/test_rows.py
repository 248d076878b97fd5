"""Rows of corpora, and their batches: what each holds, in which order, on any host."""

import os
import threading
import time
import tracemalloc
from contextlib import closing
from itertools import islice, pairwise

import numpy as np
import pytest

from data.batch import Batch, Block
from data.rows import (
    ROW_PLANS,
    DocumentRows,
    InOrder,
    PackedRows,
    Shuffled,
    TextBatches,
    WholeRows,
    iterate,
)
from data.text.tokens import document_starts
from data.text.tokens.token_file import TokenFile, TokenFileWriter
from kernels.layouts import Contiguous, Striped, Zigzag, order
from tests.small.corpora import (
    NUMBERS,
    assert_same_batch,
    make_batches,
    make_corpus,
    naive_row,
    read_rows,
)
from tests.support.fuzzing import set_field

LONGEST = 40
PLANS = [PackedRows, DocumentRows]
LENGTHS = [(plan, length) for plan in PLANS for length in (1, 7, 16, 24, 64)]
LENGTHS += [(WholeRows, length) for length in (LONGEST, LONGEST + 1, 64, 10_000)]
RINGS = [(Contiguous(), 6), (Contiguous(), 48), (Striped(), 3), (Striped(), 8)]
RINGS += [(Striped(4), 2), (Zigzag(), 4)]


@pytest.fixture
def corpus(tmp_path):
    """Documents of some rows' lengths and around them, half of them supervised."""
    rng = np.random.default_rng(7)
    lengths = [*rng.integers(1, LONGEST, 60), 1, 1, 15, 16, 17, 31, 32, 33, 2, 24, 25]
    lengths += [LONGEST, LONGEST, 1]
    with TokenFileWriter(tmp_path / "corpus", NUMBERS, has_loss_mask=True) as writer:
        for end, length in zip(np.cumsum(lengths), lengths, strict=True):
            tokens = np.arange(end - length, end)
            writer.write("train", tokens, rng.random(length) < 0.5)
    return TokenFile.open(tmp_path / "corpus", "train")


def naive_rows(plan):
    corpus, length, size = plan.corpus, plan.length, plan.corpus.tokens.size
    ends = [*corpus.starts[1:].tolist(), size]
    if isinstance(plan, PackedRows):
        begins = range(0, size - length, length)
        spans = [(begin, begin + length + 1) for begin in begins]
    elif isinstance(plan, DocumentRows):
        spans = [
            (begin, min(begin + length + 1, end))
            for start, end in pairwise([0, *ends])
            for begin in range(start, end - 1, length)
        ]
    else:
        spans, begin = [], 0
        while begin < size:
            fitting = [end for end in ends if begin < end <= begin + length]
            spans.append((begin, fitting[-1]))
            begin = fitting[-1]
    rows = [naive_row(corpus, *span, length) for span in spans]
    marks = np.append(corpus.loss_mask[:], np.zeros(length))
    return [
        row._replace(loss_weights=row.loss_weights * marks[begin + 1 :][:length])
        for row, (begin, _) in zip(rows, spans, strict=True)
    ]


@pytest.mark.parametrize("block", [3, 1 << 12])
@pytest.mark.parametrize("plan, length", LENGTHS)
def test_rows_equal_a_loop_over_tokens(corpus, monkeypatch, plan, length, block):
    """Whatever number of documents is read together."""
    monkeypatch.setattr(document_starts, "BLOCK", block)
    plan = plan(TokenFile.open(corpus.directory, "train"), length)
    rows, expected = read_rows(plan), naive_rows(plan)
    assert len(rows) == len(expected) == plan.rows
    for row, wanted in zip(rows, expected, strict=True):
        assert_same_batch(row, wanted)


@pytest.mark.parametrize("name", ROW_PLANS)
def test_memory_does_not_grow_with_the_documents(tmp_path, name, rng):
    lengths = rng.integers(2, 6, 250_000)
    with TokenFileWriter(tmp_path / "corpus", NUMBERS) as writer:
        writer.write("train", np.arange(lengths.sum()), lengths=lengths)
    tracemalloc.start()
    plan = ROW_PLANS[name](TokenFile.open(tmp_path / "corpus", "train"), 64)
    index = np.arange(64, dtype=np.int32)
    for row in (0, plan.rows // 3, plan.rows - 1):
        found = plan.read(row, index)
        assert found.tokens[0] == plan.span(row)[0]
    assert tracemalloc.get_traced_memory()[1] < 0.5 * 8 * lengths.size
    tracemalloc.stop()


def test_damage_is_found_where_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(document_starts, "BLOCK", 4)
    with TokenFileWriter(tmp_path / "corpus", NUMBERS) as writer:
        writer.write("train", np.arange(40), lengths=np.full(20, 2))
    starts = np.arange(0, 40, 2, dtype="<u8")
    starts[10] = starts[11]
    starts.tofile(tmp_path / "corpus" / "train.documents.bin")
    plan = PackedRows(TokenFile.open(tmp_path / "corpus", "train"), 8)
    index = np.arange(8, dtype=np.int32)
    assert plan.read(0, index).positions.tolist() == [0, 1] * 4
    match = r"documents\.bin is damaged: document 10 begins at 22 and ends at 22; copy"
    for damaged in (
        lambda: plan.read(2, index),
        lambda: WholeRows(plan.corpus, 8).rows,
    ):
        with pytest.raises(ValueError, match=match):
            damaged()


@pytest.mark.parametrize("plan", ROW_PLANS.values())
@pytest.mark.parametrize("layout, ring_size", RINGS)
def test_blocks_of_two_hosts_join_to_rows_in_every_layout(
    corpus, plan, layout, ring_size
):
    plan, length = plan(corpus, 48), 48
    shard = length // ring_size
    columns = [(start, start + shard) for start in range(0, length, shard)]
    blocks = [Block((r, r + 1), part) for r in range(3) for part in columns]
    arguments = 3, layout, ring_size, InOrder()
    hosts = [TextBatches(plan, blocks[i::2], *arguments) for i in range(2)]
    back = np.argsort(order(layout, ring_size, length))
    wanted = read_rows(plan)
    for step in range(2):
        read = hosts[0][step] | hosts[1][step]
        for row in range(3):
            parts = [read[Block((row, row + 1), part)] for part in columns]
            arrays = zip(*parts, strict=True)
            joined = Batch(*(np.concatenate(a, axis=1)[0, back] for a in arrays))
            assert_same_batch(joined, wanted[3 * step + row], strict=True)


def test_what_several_devices_hold_of_a_row_is_read_once(corpus):
    class Counted(PackedRows):
        reads = []

        def read(self, row, index):
            self.reads.append(index.tolist())
            return super().read(row, index)

    left, right = Block((0, 1), (0, 4)), Block((0, 1), (4, 8))
    blocks = [left, right, left, left, right]
    assert [*make_batches(Counted(corpus, 8), 1, blocks=blocks)[0]] == [left, right]
    assert Counted.reads == [[*range(8)]]


def rows_of(batches, steps):
    """Which rows (of 8 tokens) the steps read."""
    first = [batches[step][batches.blocks[0]].tokens[:, 0] // 8 for step in steps]
    return np.concatenate(first)


def test_every_epoch_has_every_row_once_in_a_new_order(corpus):
    plan = PackedRows(corpus, 8)
    batches = make_batches(plan, rows=3)
    epochs = rows_of(batches, range(plan.rows)).reshape(3, plan.rows)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(plan.rows))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert not (np.diff(epochs) > 0).all(axis=1).any()


def test_batch_of_one_row_and_corpus_of_one_row_repeat(tmp_path):
    plan = PackedRows(make_corpus(tmp_path, [9]), 8)
    batches = make_batches(plan, rows=1)
    for step in (0, 1, 10**9):
        (batch,) = batches[step].values()
        assert batch.tokens.tolist() == [list(range(8))]
    (batch,) = make_batches(plan, rows=2)[0].values()
    assert batch.tokens.tolist() == [list(range(8))] * 2


def test_validation_reads_whole_batches_in_order(corpus):
    plan = PackedRows(corpus, 8)
    batches = make_batches(plan, rows=4, row_order=InOrder())
    assert len(batches) == plan.rows // 4
    np.testing.assert_array_equal(
        rows_of(batches, range(len(batches))), np.arange(plan.rows // 4 * 4)
    )
    assert [step for step, _ in iterate(batches)] == list(range(len(batches)))
    with pytest.raises(IndexError, match=f"step={len(batches)} must be one of the"):
        batches[len(batches)]


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_resumed_rows_equal_undisturbed_rows(corpus, plan, threads):
    batches = make_batches(plan(corpus, 8), rows=5, layout=Striped(), ring_size=4)
    with closing(iterate(batches)) as steps:
        undisturbed = list(islice(steps, 40))
    assert [step for step, _ in undisturbed] == list(range(40))
    for first in (0, 1, 17, 39):
        resumed = make_batches(plan(corpus, 8), rows=5, layout=Striped(), ring_size=4)
        with closing(iterate(resumed, first, threads=threads)) as steps:
            seen = list(islice(steps, 40 - first))
        assert [step for step, _ in seen] == list(range(first, 40))
        for (_, blocks), (_, expected) in zip(seen, undisturbed[first:], strict=True):
            assert blocks.keys() == expected.keys()
            for block in blocks:
                assert_same_batch(blocks[block], expected[block], strict=True)


def reading_threads():
    return [t for t in threading.enumerate() if t.name.startswith("grain-prefetch")]


@pytest.mark.parametrize("way", ["exhausted", "closed", "dropped"])
def test_threads_end_with_the_iterator(corpus, way):
    row_order = InOrder() if way == "exhausted" else Shuffled(0)
    before = reading_threads()
    steps = iterate(make_batches(PackedRows(corpus, 8), row_order=row_order))
    assert next(steps)[0] == 0
    mine = [thread for thread in reading_threads() if thread not in before]
    assert mine
    if way == "exhausted":
        assert len(list(steps)) > 10
    elif way == "closed":
        steps.close()
    else:
        del steps
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in mine):
        assert time.monotonic() < deadline, f"{mine} still run"
        time.sleep(0.01)


def test_errors_come_at_their_own_step():
    class BrokenAtThree(dict):
        def __missing__(self, step):
            raise OSError(f"disk gone at {step}")

    steps = iterate(BrokenAtThree.fromkeys((0, 1, 2, 5, 6), {}))
    assert [next(steps)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk gone at 3"):
        next(steps)


def test_corpora_without_rows_are_refused(tmp_path):
    corpus = make_corpus(tmp_path, [3, 9, 4])
    for plan, length, rows in zip(
        ROW_PLANS.values(), (15, 99, 9), (1, 3, 3), strict=True
    ):
        assert plan(corpus, length).rows == rows
        with pytest.raises(ValueError, match="length=0 must be at least 1"):
            plan(corpus, 0)
    match = f"split 'train' of {corpus.directory}, of 16 tokens, has no row of 16"
    with pytest.raises(ValueError, match=match):
        PackedRows(corpus, 16)
    with pytest.raises(ValueError, match="document 1 of split 'train' .* has 9 tokens"):
        WholeRows(corpus, 8)
    (tmp_path / "ones").mkdir()
    with pytest.raises(ValueError, match="of 3 tokens, has no row of 4"):
        DocumentRows(make_corpus(tmp_path / "ones", [1, 1, 1]), 4)


def test_bad_batches_are_refused(corpus):
    plan = PackedRows(corpus, 24)
    few = f": a batch cannot be made of {plan.rows} rows of"
    with pytest.raises(ValueError, match=f"={plan.rows + 1}{few}.*shorter context"):
        make_batches(plan, rows=plan.rows + 1, row_order=InOrder())
    with pytest.raises(ValueError, match=f"=0{few}.*at least 1"):
        make_batches(plan, rows=0, blocks=[])
    with pytest.raises(ValueError, match="Seed"):
        make_batches(plan, row_order=Shuffled(-1))
    with pytest.raises(IndexError, match="step=-1"):
        make_batches(plan)[-1]
    batches = make_batches(plan, row_order=InOrder())
    for first in (-1, len(batches)):
        with pytest.raises(ValueError, match=f"first_step={first} must be one of"):
            iterate(batches, first)


def stretched(directory, tokens):
    """A sparse corpus of this many tokens, which takes no space on the disk."""
    corpus = make_corpus(directory, [1, 2, 3]).directory
    set_field(corpus / "meta.json", "splits.train.tokens", tokens)
    os.truncate(corpus / "train.tokens.bin", 4 * tokens)
    return TokenFile.open(corpus, "train")


def test_huge_files_are_not_read_whole(tmp_path):
    tracemalloc.start()
    plan = PackedRows(stretched(tmp_path, 3 << 30), 1023)
    row = plan.read(plan.rows - 1, np.arange(1023, dtype=np.int32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.rows * 1023 + 3 == 3 << 30
    assert row.positions.tolist() == list(range(1023))
    assert peak < 1 << 20


@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Zigzag()], ids=str)
@pytest.mark.parametrize("mebi", [1, 16, 128])
def test_a_host_sets_up_and_reads_its_part_of_a_row_alone(tmp_path, layout, mebi):
    """A row of up to 128 Mi tokens on a ring of 512, of which the host has 4 shards."""
    length = mebi << 20
    plan = PackedRows(stretched(tmp_path, length + 1), length)
    shard = length // 512
    blocks = [Block((0, 1), (d * shard, (d + 1) * shard)) for d in range(508, 512)]
    tracemalloc.start()
    batches = TextBatches(plan, blocks, 1, layout, 512, InOrder())
    batch = batches[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = np.concatenate([batch[block].positions[0] for block in blocks])
    expected = order(layout, 512, length, (508 * shard, length))
    # All but six tokens are of the third document.
    np.testing.assert_array_equal(found, np.where(expected < 3, found, expected - 3))
    given = 4 * shard * len(Batch._fields) * 4
    assert peak < 8 * given + (4 << 20)
