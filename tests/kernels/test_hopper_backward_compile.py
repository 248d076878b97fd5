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
from jax.sharding import Mesh

from kernels.hopper import launch as hopper
from kernels.hopper.launch import Launch
from tests.mosaic_kernels import Inspected, inspect
from training.pods import SHARED_BYTES, h200_devices


def step(
    head_dim: int,
    dtype: jnp.dtype = jnp.bfloat16,
    group: int = 2,
    length: int = 1024,
    bound_rows: int = 1,
) -> tuple:
    """Operands of a step with 2 key/value heads, dq first."""

    def array(*shape: int, dtype: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    q, k = (array(2, length, heads, head_dim) for heads in (2 * group, 2))
    row = array(2, 2 * group, length, dtype=jnp.float32)
    bound = array(bound_rows, length, dtype=jnp.int32)
    dq = array(*q.shape, dtype=jnp.float32)
    return dq, q, k, k, q, row, row, bound, bound


def backward(dq, *operands, is_deterministic: bool = False):
    launch = Launch(is_deterministic=is_deterministic)
    return hopper.backward(*operands, scale=0.1, dq=dq, launch=launch)


def compiled(function, *arguments) -> Inspected:
    mesh = Mesh(np.array(h200_devices()), ("device",))
    return inspect(mesh, jax.jit(function, donate_argnums=0), *arguments)


def assert_spills_nothing(is_deterministic: bool, head_dim: int, *sizes) -> None:
    function = functools.partial(backward, is_deterministic=is_deterministic)
    kernels = compiled(function, *step(head_dim, *sizes)).kernels
    names = {"flash_backward"}
    if is_deterministic or head_dim > 128:
        names = {"flash_backward_keys", "flash_backward_queries"}
    assert len(kernels) == len(names)
    assert {kernel.name for kernel in kernels} == names
    for kernel in kernels:
        assert (kernel.spill_bytes, kernel.serialized) == (0, 0)
        # What three warpgroups can start with; consumers go on with more.
        assert kernel.registers == 168
        assert 2**16 < kernel.shared_bytes <= SHARED_BYTES


@pytest.mark.parametrize(
    "head_dim, is_deterministic",
    [(64, False), (64, True), (128, False), (128, True), (256, False)],
)
def test_nothing_is_spilled_and_products_overlap(head_dim, is_deterministic):
    assert_spills_nothing(is_deterministic, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bound_rows", [1, 2])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("length", [1, 131072])
@pytest.mark.parametrize("head_dim", [64, 100, 128, 256])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_any_shape_compiles_as_well(
    is_deterministic, head_dim, length, group, bound_rows, dtype
):
    assert_spills_nothing(is_deterministic, head_dim, dtype, group, length, bound_rows)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_dq_is_added_to_where_it_is_from_step_to_step(is_deterministic):
    def two_steps(dq, *operands):
        q, k, v, *rest = operands
        ring_step = functools.partial(backward, is_deterministic=is_deterministic)
        dq, *first = ring_step(dq, q, k, v, *rest)
        dq, *second = ring_step(dq, q, v, k, *rest)
        return dq, first, second

    arguments = step(128, length=4096)
    program = compiled(two_steps, *arguments).program
    text = program.as_text()
    calls = re.findall(r"= .* custom-call\(.*flash_backward", text)
    assert len(calls) == (4 if is_deterministic else 2)
    assert "input_output_alias={ {0}: (0, {}" in text
    shape = ",".join(map(str, arguments[0].shape))
    assert not re.search(rf"= f32\[{shape}\]\S* (copy|fusion|add|pad)", text)
    dq_bytes = 4 * int(np.prod(arguments[0].shape))
    assert program.memory_analysis().temp_size_in_bytes < dq_bytes / 4
