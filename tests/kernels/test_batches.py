"""Batches on a mesh: what a loop over tokens says of each, wherever it lies."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from kernels import Contiguous, Striped, Zigzag, permute, shard_batch
from tests.cases import table


def mesh_of(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "ring"), (kind,) * 2)


@pytest.mark.parametrize(
    "layout, kind",
    [
        (Striped(), AxisType.Auto),
        (Zigzag(), AxisType.Explicit),
        (Contiguous(), AxisType.Auto),
    ],
    ids=str,
)
def test_each_token_keeps_its_position_target_and_weight(layout, kind, rng):
    mesh = mesh_of(kind)
    ids = np.sort(rng.integers(0, 5, (2, 32)))
    tokens = rng.integers(0, 100, (2, 32))
    targets, weights, positions = np.zeros((3, 2, 32))
    for row in range(2):
        for place in range(32):
            positions[row, place] = place - ids[row].tolist().index(ids[row, place])
            last = place == 31
            targets[row, place] = tokens[row, 0 if last else place + 1]
            same = not last and ids[row, place] == ids[row, place + 1]
            weights[row, place] = same
    batch = shard_batch(tokens, None, ids, layout, mesh)
    expected = tokens, targets, weights, positions
    for got, natural in zip(batch[:4], expected, strict=True):
        np.testing.assert_array_equal(got, permute(natural, layout, 4))
        assert got.sharding.spec == PartitionSpec(("data",), ("ring",))
        assert got.addressable_shards[0].data.shape == (1, 8)
    np.testing.assert_array_equal(batch.segment_ids, ids)
    assert batch.segment_ids.addressable_shards[0].data.shape == (1, 32)


def test_positions_are_those_given_and_rows_may_be_one_document(rng):
    tokens, positions = rng.integers(0, 100, (2, 2, 32))
    batch = shard_batch(tokens, positions, None, Striped(), mesh_of())
    np.testing.assert_array_equal(batch.positions, permute(positions, Striped(), 4))
    assert float(batch.weights.sum()) == 2 * 31


@pytest.mark.parametrize("tokens, ids, words", table("kernels.txt", "batch", np=np))
def test_batches_that_do_not_fit_are_refused(tokens, ids, words):
    with pytest.raises(ValueError, match=words):
        shard_batch(tokens, None, ids, Striped(), mesh_of())
