"""Compiles the Hopper forward kernel for a described H200, by XLA and ptxas.

Nothing runs here. What is compiled is what runs on the GPU, so it shows whether the
registers suffice, shared memory holds the tiles, and products overlap.
"""

import functools
import re

import jax.numpy as jnp
import pytest
from jax import lax

from kernels.backends.hopper import shared
from kernels.backends.hopper.forward import Consumer
from kernels.backends.hopper.launch import FORWARD, HopperBlocks, Launch
from tests.cases.attention import covering
from tests.mosaic_kernels import (
    Inspected,
    Kernel,
    assert_nothing_spills_and_products_overlap,
    inspect,
    read_kernels,
)
from tests.steps import StepCase, run_forward
from tools.lib.compiled.pods import SHARED_BYTES


@functools.cache
def compiled(
    head_dim: int,
    dtype: jnp.dtype = jnp.bfloat16,
    length: int = 1024,
    has_carry: bool = True,
    soft_cap: float | None = None,
    blocks: HopperBlocks | None = None,
) -> Inspected:
    """Compiles a step with 2 query heads a key/value head."""
    case = StepCase(length, length, 2, head_dim, 2, batch=1, has_carry=has_carry)
    backend = Launch(blocks)
    forward = functools.partial(run_forward, backend, 0.1, None, soft_cap=soft_cap)
    return inspect(forward, case.abstract(dtype))


def assert_is_well_compiled(kernels: list[Kernel]) -> None:
    assert_nothing_spills_and_products_overlap(kernels, {"flash_forward"}, 2**17)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "head_dim, has_carry, soft_cap",
    [
        *[(128, True, None), (64, False, 50.0), (256, True, 50.0)],
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((64, True, None), (128, False, 50.0), (256, False, None))
        ),
    ],
)
def test_nothing_is_spilled_and_all_exponentials_are_issued_while_a_product_runs(
    head_dim, has_carry, soft_cap
):
    """In the order that `forward` draws: P(n-1) V(n-1) runs until the last wait."""
    kernels = compiled(head_dim, has_carry=has_carry, soft_cap=soft_cap).kernels
    assert_is_well_compiled(kernels)
    assert SHARED_BYTES == shared.SHARED_BYTES
    (kernel,) = kernels
    block_k = FORWARD[head_dim].block_k
    # A thread has half of block_k scores (with a cap, two each) and two alphas.
    exponentials = block_k // 2 * (1 if soft_cap is None else 2) + 2
    assert kernel.pipeline == (
        f"{head_dim // 16} SS 64x{block_k}x16",  # S(n) = Q Kᵀ
        f"{block_k // 16} RS 64x{head_dim}x16",  # acc += P(n-1) V(n-1)
        "wait 1",  # drains S(n)
        f"{exponentials} exp2",
        "wait 0",  # drains P(n-1) V(n-1)
    )


SHAPES = {
    "head_dim": (64, 100, 128, 256),
    "length": (1, 4093, 131072),
    "dtype": (jnp.bfloat16, jnp.float16),
    "has_carry": (False, True),
    "soft_cap": (None, 50.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(tuple(SHAPES), covering(SHAPES))
def test_any_shape_compiles_as_well(head_dim, length, dtype, has_carry, soft_cap):
    sizes = head_dim, dtype, length, has_carry, soft_cap
    assert_is_well_compiled(compiled(*sizes).kernels)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "length, grid", [({}, (4, 1, 8)), ({"length": 2**23}, (2**16, 4, 1))]
)
def test_the_long_axis_is_where_gpus_have_room_for_it(length, grid):
    """CUDA launches up to 65,535 programs along y and z, and 2³¹ - 1 along x."""
    (kernel,) = compiled(64, has_carry=False, soft_cap=50.0, **length).kernels
    assert kernel.grid == grid


@pytest.mark.thorough
def test_spills_are_reported():
    (kernel,) = compiled(128, blocks=HopperBlocks(192, 2)).kernels
    assert kernel.spill_bytes > 100


@pytest.mark.thorough
def test_products_that_wait_for_each_other_are_reported(monkeypatch):
    softmax = Consumer._softmax

    def barred(self, *operands):
        return lax.optimization_barrier(softmax(self, *operands))

    monkeypatch.setattr(Consumer, "_softmax", barred)
    (kernel,) = compiled.__wrapped__(128).kernels
    assert kernel.serialized == 1
    assert kernel.pipeline[-2:] == ("wait 0", "66 exp2")


@pytest.mark.thorough
def test_heads_of_full_size_are_not_copied():
    program = compiled(128, has_carry=True, soft_cap=None).program.as_text()
    assert "flash_forward" in program
    assert not re.search(r"= bf16\[[^=]*(pad|copy|transpose|fusion)\(", program)


def test_what_mosaic_prints_otherwise_is_refused():
    printed = "Compiling entry function 'flash_forward_mosaic_gpu_kernel' for 'sm_90a'"
    with pytest.raises(ValueError, match="1 kernels, but registers of 0"):
        read_kernels(printed)
    assert read_kernels("") == []
