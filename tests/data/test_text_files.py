"""Of files of any size, and rows of any length, a host reads its part alone."""

import os
import tracemalloc

import numpy as np
import pytest

from data.batch import Batch, Block
from data.rows import InOrder, PackedRows, TextBatches
from data.text.token_file import TokenFile
from kernels.layouts import Contiguous, Striped, Zigzag, order
from tests.fuzzing import set_field
from tests.numbered_corpus import make_corpus


def test_huge_files_are_not_read_whole(tmp_path):
    corpus = make_corpus(tmp_path, [1, 2, 3])
    directory, size = corpus.directory, 3 << 30
    set_field(directory / "meta.json", "splits.train.tokens", size)
    set_field(directory / "meta.json", "splits.train.largest_token", 78)
    with (directory / "train.tokens.bin").open("r+b") as file:
        file.truncate(4 * size)  # sparse: takes no space
        file.seek(4 * (size - 2))
        file.write(np.array([77, 78], "<u4").tobytes())
    tracemalloc.start()
    plan = PackedRows(TokenFile.open(directory, "train"), 1023)
    row = plan.read(plan.rows - 1, np.arange(1023, dtype=np.int32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert plan.rows * 1023 + 3 == size
    assert row.positions.tolist() == list(range(1023))
    assert peak < 1 << 20


@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Zigzag()], ids=str)
@pytest.mark.parametrize("mebi", [1, 16, 128])
def test_a_host_sets_up_and_reads_its_part_of_a_row_alone(tmp_path, layout, mebi):
    """A row of up to 128 Mi tokens on a ring of 512, of which the host has 4 shards."""
    corpus = make_corpus(tmp_path, [1, 2, 3])
    directory, length = corpus.directory, mebi << 20
    set_field(directory / "meta.json", "splits.train.tokens", length + 1)
    os.truncate(directory / "train.tokens.bin", 4 * (length + 1))
    plan = PackedRows(TokenFile.open(directory, "train"), length)
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
