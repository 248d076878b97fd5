"""Compiles the Hopper forward kernel for a described H200, by XLA and ptxas.

Nothing runs here. What is compiled is what runs on the GPU, so it shows whether the
registers suffice, shared memory holds the tiles, and products overlap.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

from kernels.hopper import launch as hopper
from kernels.hopper import shared
from kernels.hopper.forward import Consumer
from kernels.hopper.launch import HopperBlocks, Launch
from tests.mosaic_kernels import Inspected, Kernel, inspect, read_kernels
from training.pods import SHARED_BYTES, compile_for, h200_devices


def step(
    head_dim: int,
    dtype: jnp.dtype = jnp.bfloat16,
    has_carry: bool = True,
    length: int = 1024,
) -> tuple:
    """Operands of a step with 2 query heads a key/value head."""

    def array(*shape: int, dtype: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    q, k = (array(1, length, heads, head_dim) for heads in (4, 2))
    bound = array(1, length, dtype=jnp.int32)
    before = (
        array(*q.shape, dtype=jnp.float32),
        array(1, 4, length, dtype=jnp.float32),
    )
    return q, k, k, bound, bound, before if has_carry else None


def forward(q, k, v, start, stop, carry, *, blocks: HopperBlocks | None = None):
    return hopper.forward(
        q, k, v, start, stop, scale=0.1, carry=carry, launch=Launch(blocks)
    )


def mesh() -> Mesh:
    return Mesh(np.array(h200_devices()), ("device",))


def compiled(blocks: HopperBlocks | None, *arguments) -> Inspected:
    return inspect(mesh(), functools.partial(forward, blocks=blocks), *arguments)


def assert_spills_nothing(kernels: list[Kernel]) -> None:
    (kernel,) = kernels
    assert kernel.name == "flash_forward"
    assert (kernel.spill_bytes, kernel.serialized) == (0, 0)
    # What three warpgroups can start with; consumers go on with more.
    assert kernel.registers == 168
    assert 2**17 < kernel.shared_bytes <= SHARED_BYTES == shared.SHARED_BYTES


@pytest.mark.parametrize("has_carry", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nothing_is_spilled_and_products_overlap(head_dim, has_carry):
    arguments = step(head_dim, has_carry=has_carry)
    assert_spills_nothing(compiled(None, *arguments).kernels)


@pytest.mark.slow
@pytest.mark.parametrize("has_carry", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("length", [1, 4093, 131072])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
def test_any_shape_compiles_as_well(head_dim, length, dtype, has_carry):
    arguments = step(head_dim, dtype, has_carry, length)
    assert_spills_nothing(compiled(None, *arguments).kernels)


@pytest.mark.parametrize(
    "length, grid", [(1024, (4, 1, 8)), (2**23, (2**16, 4, 1))], ids=["short", "long"]
)
def test_the_long_axis_is_where_gpus_have_room_for_it(length, grid):
    """CUDA launches up to 65,535 programs along y and z, and 2³¹ - 1 along x."""
    (kernel,) = compiled(None, *step(64, length=length)).kernels
    assert kernel.grid == grid


def test_spills_are_reported():
    (kernel,) = compiled(HopperBlocks(192, 1), *step(128)).kernels
    assert kernel.spill_bytes > 100


def test_products_that_wait_for_each_other_are_reported(monkeypatch):
    softmax = Consumer._softmax

    def barred(self, *operands):
        return lax.optimization_barrier(softmax(self, *operands))

    monkeypatch.setattr(Consumer, "_softmax", barred)
    (kernel,) = compiled(None, *step(128)).kernels
    assert kernel.serialized == 1


def test_heads_of_full_size_are_not_copied():
    program = compile_for(mesh(), forward, *step(128)).as_text()
    assert "flash_forward" in program
    assert not re.search(r"= bf16\[[^=]*(pad|copy|transpose|fusion)\(", program)


def test_what_mosaic_prints_otherwise_is_refused():
    printed = "Compiling entry function 'flash_forward_mosaic_gpu_kernel' for 'sm_90a'"
    with pytest.raises(ValueError, match="1 kernels, but registers of 0"):
        read_kernels(printed)
    assert read_kernels("") == []
