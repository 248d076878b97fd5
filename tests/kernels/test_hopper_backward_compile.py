"""Compiles the Hopper backward kernels for a described H200, by XLA and ptxas.

Nothing runs here, as in `test_hopper_compile`: it shows whether the registers suffice,
shared memory holds the tiles, products overlap, and dq stays where it is.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends.hopper.launch import BACKWARD, BACKWARD_DQ, Launch
from tests.cases.attention import covering
from tests.mosaic_kernels import (
    Inspected,
    Kernel,
    assert_nothing_spills_and_products_overlap,
    inspect,
)
from tests.steps import Step, StepCase, run_backward


def step(
    head_dim: int,
    dtype: jnp.dtype = jnp.bfloat16,
    group: int = 2,
    length: int = 1024,
    bound_rows: int = 1,
) -> Step:
    """Returns the operands of a step with 2 key/value heads."""
    sizes = length, length, group, head_dim
    return StepCase(*sizes, kv_heads=2, bound_rows=bound_rows).abstract(dtype)


def backward(
    dq, step: Step, is_deterministic: bool = False, soft_cap: float | None = None
):
    backend = Launch(is_deterministic=is_deterministic)
    step = step._replace(dq=dq)
    return run_backward(backend, 0.1, None, step, step.delta, soft_cap=soft_cap)


@functools.cache  # where options have the same order
def compiled(function, step: Step, **options) -> Inspected:
    function = functools.partial(function, **options)
    return inspect(jax.jit(function, donate_argnums=0), step.dq, step)


def well_compiled(step: Step, **options) -> list[Kernel]:
    """Returns the kernels, of which none spills and whose products overlap."""
    names = {"flash_backward"}
    if options["is_deterministic"] or step.q.shape[-1] > 128:
        names = {"flash_backward_keys", "flash_backward_queries"}
    kernels = compiled(backward, step, **options).kernels
    assert_nothing_spills_and_products_overlap(kernels, names, 2**16)
    # CUDA launches no more along y and z.
    assert max(max(kernel.grid[1:]) for kernel in kernels) < 2**16
    return kernels


def exponentials(scores: int, soft_cap: float | None) -> str:
    """Those of a thread of 128, for 64 rows of scores; a cap takes one more each."""
    return f"{scores // 2 * (1 if soft_cap is None else 2)} exp2"


def pipeline_of_keys(
    head_dim: int, soft_cap: float | None, *dq: str
) -> tuple[str, ...]:
    """Returns what the kernel of dk and dv issues; dq: what for that, if anything."""
    block_q, columns = BACKWARD[head_dim]["block_q"], min(head_dim, 128)
    return (
        f"{head_dim // 16} SS 64x{block_q}x16",  # S(n) = K Qᵀ
        "wait 1",  # drains dK(n-1)
        f"{head_dim // 16} SS 64x{block_q}x16",  # dP(n) = V dOᵀ
        "wait 1",  # drains S(n)
        exponentials(block_q, soft_cap),
        f"{block_q // 16} RS 64x{columns}x16",  # dV += P(n) dO
        "wait 1",  # drains dP(n)
        *dq,
        f"{block_q // 16} RS 64x{columns}x16",  # dK += dS(n) Q
        "wait 1",  # drains dV(n)
    )


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "head_dim, soft_cap", [(64, 50.0), (128, None), slow(128, 50.0)]
)
def test_nothing_is_spilled_and_products_are_issued_as_drawn(head_dim, soft_cap):
    options = {"is_deterministic": False, "soft_cap": soft_cap}
    (kernel,) = well_compiled(step(head_dim), **options)
    dq = "8 SS 64x64x16"  # dQ(n-1) = dS K, which the last wait drains too
    assert kernel.pipeline == pipeline_of_keys(head_dim, soft_cap, dq)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "head_dim, length, soft_cap",
    [
        *[slow(64, 2**23, None), (64, 2**23, 50.0), (128, 1024, None)],
        *[slow(256, 1024, None), (256, 1024, 50.0)],
    ],
)
def test_those_of_two_kernels_are_too(head_dim, length, soft_cap):
    options = {"is_deterministic": head_dim <= 128, "soft_cap": soft_cap}
    kernels = well_compiled(step(head_dim, length=length), **options)
    keys, queries = sorted(kernels, key=lambda kernel: kernel.name)
    assert keys.pipeline == pipeline_of_keys(head_dim, soft_cap)
    block_k = BACKWARD_DQ[head_dim]["block_k"]
    assert queries.pipeline == (
        f"{head_dim // 16} SS 64x{block_k}x16",  # S(n) = Q Kᵀ
        "wait 1",  # drains dQ(n-1)
        f"{head_dim // 16} SS 64x{block_k}x16",  # dP(n) = dO Vᵀ
        "wait 1",  # drains S(n)
        exponentials(block_k, soft_cap),
        "wait 0",  # drains dP(n)
        f"{block_k // 16} RS 64x{head_dim}x16",  # dQ += dS(n) K
    )


SHAPES = {
    "is_deterministic": (False, True),
    "head_dim": (64, 100, 128, 256),
    "length": (1, 131072),
    "group": (1, 4),
    "bound_rows": (1, 2),
    "dtype": (jnp.bfloat16, jnp.float16),
    "soft_cap": (None, 50.0),
}


@pytest.mark.slow
@pytest.mark.parametrize(tuple(SHAPES), covering(SHAPES))
def test_any_shape_compiles_as_well(
    is_deterministic, head_dim, length, group, bound_rows, dtype, soft_cap
):
    options = {"is_deterministic": is_deterministic, "soft_cap": soft_cap}
    sizes = head_dim, dtype, group, length, bound_rows
    assert well_compiled(step(*sizes), **options)


@pytest.mark.thorough
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_dq_is_added_to_where_it_is_from_step_to_step(is_deterministic):
    def two_steps(dq, step, is_deterministic):
        dq, *first = backward(dq, step, is_deterministic)
        step = step._replace(k=step.v, v=step.k)
        dq, *second = backward(dq, step, is_deterministic)
        return dq, first, second

    operands = step(128, length=4096)
    options = {"is_deterministic": is_deterministic}
    program = compiled(two_steps, operands, **options).program
    text = program.as_text()
    calls = re.findall(r"= .* custom-call\(.*flash_backward", text)
    assert len(calls) == (4 if is_deterministic else 2)
    assert "input_output_alias={ {0}: (0, {}" in text
    shape = ",".join(map(str, operands.dq.shape))
    assert not re.search(rf"= f32\[{shape}\]\S* (copy|fusion|add|pad)", text)
    dq_bytes = 4 * int(np.prod(operands.dq.shape))
    assert program.memory_analysis().temp_size_in_bytes < dq_bytes / 4


@pytest.mark.thorough
@pytest.mark.parametrize("is_deterministic", [False, slow(True)])
def test_kernels_that_add_in_place_are_not_fused_with_slices(is_deterministic):
    """XLA forgets of a fused kernel that a result is in the place of an operand."""

    def backwards(dq, steps, is_deterministic):
        run = functools.partial(backward, is_deterministic=is_deterministic)
        return jax.lax.map(lambda x: run(*x), (dq, steps))

    steps = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), step(128)
    )
    text = compiled(backwards, steps, is_deterministic=is_deterministic).program
    computations = text.as_text().split("\n\n")
    (place,) = (x for x in computations if "output_to_operand_aliasing" in x)
    assert not place.lstrip().startswith("%dynamic-slice-fusion")
