"""Compiles the Hopper kernels for a described H200, by XLA and ptxas.

Nothing runs here. What is compiled is what runs on the GPU, so it shows whether the
registers suffice, shared memory holds the tiles, products overlap, and dq stays where
it is.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from kernels.attention import attention
from kernels.backends.hopper import shared
from kernels.backends.hopper.forward import ForwardConsumer
from kernels.backends.hopper.launch import (
    BACKWARD,
    BACKWARD_DQ,
    FORWARD,
    Launch,
)
from tests.cases import in_tiers
from tests.cases.attention import covering
from tests.support.mosaic_kernels import (
    Inspected,
    Kernel,
    assert_nothing_spills_and_products_overlap,
    inspect,
    read_kernels,
)
from tests.support.steps import Step, StepCase, run_backward, run_forward
from tools.lib.compiled.gpus import SHARED_BYTES

SEPARATE = {"flash_backward_keys", "flash_backward_queries"}


def step(head_dim: int, length: int = 1024, **sizes) -> StepCase:
    """Returns a step with 2 query heads for each of 2 key/value heads."""
    sizes = {"group": 2, "kv_heads": 2, "batch": 1, **sizes}
    return StepCase(length, length, head_dim=head_dim, **sizes)


def run(
    dq,
    step: Step,
    which: str,
    case: StepCase,
    blocks: tuple[int, int, int] | None = None,
):
    """Runs a pass, of which dq can be donated; backward in one kernel, or in two."""
    backend = Launch(blocks, is_deterministic=which == "deterministic")
    given = backend, 0.1, None, step._replace(dq=dq)
    if which == "forward":
        return run_forward(*given, soft_cap=case.soft_cap)
    return run_backward(*given, step.delta, soft_cap=case.soft_cap)


@functools.cache
def compiled(
    which: str,
    case: StepCase,
    dtype: jnp.dtype = jnp.bfloat16,
    blocks: tuple[int, int, int] | None = None,
    run=run,
) -> Inspected:
    program = functools.partial(run, which=which, case=case, blocks=blocks)
    given = case.abstract(dtype)
    return inspect(jax.jit(program, donate_argnums=0), given.dq, given)


def well_compiled(which: str, case: StepCase, dtype=jnp.bfloat16) -> list[Kernel]:
    """Returns the kernels, of which none spills and whose products overlap."""
    names, least = {"flash_backward"}, 2**16
    if which == "forward":
        names, least = {"flash_forward"}, 2**17
    elif which == "deterministic" or case.head_dim > 128:
        names = SEPARATE
    kernels = compiled(which, case, dtype).kernels
    assert_nothing_spills_and_products_overlap(kernels, names, least)
    # CUDA launches no more along y and z.
    assert max(max(kernel.grid[1:]) for kernel in kernels) < 2**16
    return kernels


def pipeline(kernel: str, head_dim: int, soft_cap: float | None) -> tuple[str, ...]:
    """Returns what the loop of a kernel issues, as its module draws it."""
    tiles = {"flash_forward": FORWARD[head_dim][0]}
    tiles["flash_backward_queries"] = BACKWARD_DQ[head_dim][0]
    tile = tiles.get(kernel, BACKWARD[head_dim])
    scores = f"{head_dim // 16} SS 64x{tile}x16"
    # Of a thread of 128, for 64 rows of scores; a cap takes one more each.
    exponentials = tile // 2 * (1 if soft_cap is None else 2)
    if kernel == "flash_forward":
        return (
            scores,  # S(n) = Q Kᵀ
            f"{tile // 16} RS 64x{head_dim}x16",  # acc += P(n-1) V(n-1)
            "wait 1",  # drains S(n)
            f"{exponentials + 2} exp2",  # of two rows the factors alpha too
            "wait 0",  # drains P(n-1) V(n-1)
        )
    both = (
        scores,  # S(n)
        "wait 1",  # drains dK(n-1) or dQ(n-1)
        scores,  # dP(n)
        "wait 1",  # drains S(n)
        f"{exponentials} exp2",
    )
    if kernel == "flash_backward_queries":
        dq = f"{tile // 16} RS 64x{head_dim}x16"  # dQ += dS(n) K
        return *both, "wait 0", dq  # drains dP(n)
    gradient = f"{tile // 16} RS 64x{min(head_dim, 128)}x16"
    return (
        *both,
        gradient,  # dV += P(n) dO
        "wait 1",  # drains dP(n)
        # dQ(n-1) = dS K, which the last wait drains too.
        *(["8 SS 64x64x16"] if kernel == "flash_backward" else []),
        gradient,  # dK += dS(n) Q
        "wait 1",  # drains dV(n)
    )


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "which, head_dim, length, has_carry, soft_cap",
    in_tiers("kernels.txt", "hopper-kernel"),
)
def test_nothing_is_spilled_and_products_are_issued_as_drawn(
    which, head_dim, length, has_carry, soft_cap
):
    """In the forward all exponentials are issued while a product runs."""
    assert SHARED_BYTES == shared.SHARED_BYTES
    case = step(head_dim, length, has_carry=has_carry, soft_cap=soft_cap)
    for kernel in well_compiled(which, case):
        assert kernel.pipeline == pipeline(kernel.name, head_dim, soft_cap)


SHAPES = {
    "which": ("forward", "fused", "deterministic"),
    "head_dim": (64, 100, 128, 256),
    "length": (1, 4093, 131072),
    "group": (1, 4),
    "bound_rows": (1, 2),
    "has_carry": (False, True),
    "soft_cap": (None, 50.0),
    "dtype": (jnp.bfloat16, jnp.float16),
}


@pytest.mark.slow
@pytest.mark.parametrize(tuple(SHAPES), covering(SHAPES))
def test_any_shape_compiles_as_well(
    which, head_dim, length, group, bound_rows, has_carry, soft_cap, dtype
):
    more = {"group": group, "bound_rows": bound_rows, "batch": 2}
    case = step(head_dim, length, has_carry=has_carry, soft_cap=soft_cap, **more)
    assert well_compiled(which, case, dtype)


@pytest.mark.thorough
@pytest.mark.parametrize("length, grid", [(1024, (4, 1, 8)), (2**23, (2**16, 4, 1))])
def test_the_long_axis_is_where_gpus_have_room_for_it(length, grid):
    """CUDA launches up to 65,535 programs along y and z, and 2³¹ - 1 along x."""
    (kernel,) = compiled("forward", step(64, length, soft_cap=50.0)).kernels
    assert kernel.grid == grid


@pytest.mark.thorough
def test_spills_are_reported():
    case = step(128, has_carry=True)
    (kernel,) = compiled("forward", case, blocks=(192, 2, 2)).kernels
    assert kernel.spill_bytes > 100


@pytest.mark.thorough
def test_products_that_wait_for_each_other_are_reported(monkeypatch):
    softmax = ForwardConsumer._softmax

    def barred(self, *operands):
        return lax.optimization_barrier(softmax(self, *operands))

    monkeypatch.setattr(ForwardConsumer, "_softmax", barred)
    case = step(128, has_carry=True)
    (kernel,) = compiled.__wrapped__("forward", case).kernels
    assert kernel.serialized == 1
    assert kernel.pipeline[-2:] == ("wait 0", "66 exp2")


@pytest.mark.thorough
def test_heads_of_full_size_are_not_copied():
    program = compiled("forward", step(128, has_carry=True)).program.as_text()
    assert "flash_forward" in program
    assert not re.search(r"= bf16\[[^=]*(pad|copy|transpose|fusion)\(", program)


def test_what_mosaic_prints_otherwise_is_refused():
    printed = "Compiling entry function 'flash_forward_mosaic_gpu_kernel' for 'sm_90a'"
    with pytest.raises(ValueError, match="1 kernels, but registers of 0"):
        read_kernels(printed)
    assert read_kernels("") == []


@pytest.mark.thorough
def test_on_one_device_nothing_but_dq_is_rounded_behind_the_kernels():
    def both(q, k, v, do):
        out, pull = jax.vjp(
            functools.partial(attention, implementation="hopper"), q, k, v
        )
        return out, *pull(do)

    q, k = (jax.ShapeDtypeStruct((1, 1024, n, 128), jnp.bfloat16) for n in (4, 2))
    text = inspect(jax.jit(both), q, k, k, q).program.as_text()
    assert re.findall(r"= \(?bf16\[([\d,]*)\]\S* fusion\(", text) == ["1,1024,4,128"]


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["fused", "deterministic"])
def test_dq_is_added_to_where_it_is_from_step_to_step(which):
    def two_steps(dq, step, **options):
        dq, *first = run(dq, step, **options)
        dq, *second = run(dq, step._replace(k=step.v, v=step.k), **options)
        return dq, first, second

    case = step(128, 4096, batch=2)
    program = compiled(which, case, run=two_steps).program
    text, dq = program.as_text(), case.abstract(jnp.bfloat16).dq
    calls = re.findall(r"= .* custom-call\(.*flash_backward", text)
    assert len(calls) == (4 if which == "deterministic" else 2)
    assert "input_output_alias={ {0}: (0, {}" in text
    shape = ",".join(map(str, dq.shape))
    assert not re.search(rf"= f32\[{shape}\]\S* (copy|fusion|add|pad)", text)
    dq_bytes = 4 * int(np.prod(dq.shape))
    assert program.memory_analysis().temp_size_in_bytes < dq_bytes / 4


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["fused", slow("deterministic")])
def test_kernels_that_add_in_place_are_not_fused_with_slices(which):
    """XLA forgets of a fused kernel that a result is in the place of an operand."""

    def backwards(dq, step, **options):
        return jax.lax.map(lambda x: run(*x, **options), (dq, step))

    case = step(128, batch=2)
    given = case.abstract(jnp.bfloat16)
    three = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), given)
    program = functools.partial(backwards, which=which, case=case)
    text = inspect(jax.jit(program, donate_argnums=0), three.dq, three).program
    computations = text.as_text().split("\n\n")
    (place,) = (x for x in computations if "output_to_operand_aliasing" in x)
    assert not place.lstrip().startswith("%dynamic-slice-fusion")
