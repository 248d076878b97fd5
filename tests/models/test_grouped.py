"""Grouped products and their gradients against each group's own product in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from models.grouped import GRADIENTS, MATRICES, _matrix_tile, grouped_product
from tests.small.models import assert_same, partition_of
from tools.lib.compiled.pods import tpu_devices
from training.sharding.mesh import MeshShape, Partition, make_mesh
from training.sharding.stationary import StationaryPartition

# Rows, inputs, outputs, and rows of each group.
CASES = {
    "odd": (300, 200, 160, (130, 0, 1, 169)),
    "rank": (256, 16, 130, (128, 128)),
    "few": (7, 300, 16, (0, 3, 4)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("units", [None, (1, 256), (2, 128)])
@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients_are_those_of_each_group(case, units):
    rows, inputs, outputs, sizes = CASES[case]
    rng = np.random.default_rng(7)
    x = rng.normal(size=(rows, inputs))
    weight = rng.normal(size=(len(sizes), inputs, outputs))
    dy = rng.normal(size=(rows, outputs))

    def ours(x: jax.Array, weight: jax.Array) -> jax.Array:
        groups = jnp.array(sizes, jnp.int32)
        return grouped_product(x, weight, groups, "tpu", units)

    with pltpu.force_tpu_interpret_mode():
        operands = [jnp.asarray(v, jnp.float32) for v in (x, weight, dy)]
        y, backward = jax.vjp(ours, *operands[:2])
        got = jax.device_get((y, *backward(operands[2])))
    group = np.repeat(np.arange(len(sizes)), sizes)
    dw = np.zeros_like(weight)
    np.add.at(dw, group, x[:, :, None] * dy[:, None])
    y = np.einsum("mi,mio->mo", x, weight[group])
    dx = np.einsum("mo,mio->mi", dy, weight[group])
    assert_same(got, (y, dx, dw), 1e-6)


@pytest.mark.parametrize(
    ("inputs", "outputs", "units", "tile", "of_gradient"),
    [
        # Qwen3-30B-A3B: two cores take as many columns
        (2048, 1536, (2, 128), (2048, 768), (1024, 768)),
        (2048, 1536, (1, 128), (1024, 1536), (1024, 768)),
        (2048, 1536, (1, 256), (2048, 1536), (1024, 1536)),
        (768, 2048, (2, 128), (768, 1024), (768, 1024)),
        (768, 2048, (1, 256), (768, 2048), (768, 2048)),
        # gpt-oss: no multiple of 128 divides 2880
        (2880, 5760, (2, 128), (1024, 1536), (768, 1024)),
        (2880, 5760, (1, 256), (2880, 1024), (1024, 1536)),
        (16, 2048, (2, 128), (16, 1024), (16, 1024)),
        (2048, 16, (2, 128), (2048, 16), (2048, 16)),
    ],
)
def test_tiles_fit_into_memory_and_leave_no_core_idle(
    inputs, outputs, units, tile, of_gradient
):
    cores, side = units
    assert _matrix_tile(inputs, outputs, MATRICES[side], units) == tile
    assert _matrix_tile(inputs, outputs, GRADIENTS[side], units) == of_gradient
    assert np.prod(tile) <= MATRICES[side] and np.prod(of_gradient) <= GRADIENTS[side]
    assert -(-outputs // tile[1]) % cores == 0 or outputs <= 128


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("topology", "units"),
    [
        ("v5p:2x2x1", (2, 128)),
        ("v5e:2x2", (1, 128)),
        ("v6e:2x2", (1, 256)),
        ("tpu7x:2x2x1", (1, 256)),
    ],
)
def test_kernels_are_given_the_units_of_their_chip(topology, units):
    devices = tpu_devices(topology)
    mesh = make_mesh(MeshShape(ring=len(devices)), devices)
    assert Partition(mesh).kernel_units == units
    # XLA shards the products of generation, and those of CPUs.
    assert StationaryPartition(mesh).kernel_units is None
    assert partition_of(MeshShape()).kernel_units is None
