"""The parts of Pallas Mosaic GPU that the Hopper kernels use.

JAX calls these names unstable ("can change weekly"), so they are imported here and
nowhere else. What the names mean: a program is a block of warpgroups, 128 threads each;
Pallas runs the kernel once per warpgroup. Tiles arrive in shared memory by TMA, whose
completion a barrier counts, and WGMMA multiplies them asynchronously.

Pallas can also interpret a kernel on a CPU, warpgroup by warpgroup, and then reports
races. It knows no WGMMA with an operand in registers and no accumulator that is written
to, nor TMA that adds: `Emulated` stands in for these, and for nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

Interpreter = plgpu.InterpretGPUParams

Barrier = plgpu.Barrier
arrive = plgpu.barrier_arrive
wait = plgpu.barrier_wait
copy_in = plgpu.copy_gmem_to_smem
set_max_registers = plgpu.set_max_registers
multiply = plgpu.wgmma
read_product = plgpu.wgmma_accumulator_load
wait_for_products = plgpu.wgmma_wait
commit_shared = plgpu.commit_smem
wait_for_copies_out = plgpu.wait_smem_to_gmem

ROWS = plgpu.Layout.WGMMA.reduce(1)
"""One number for each row of a WGMMA result."""

COLUMNS = plgpu.Layout.WGMMA.reduce(0)
"""One number for each column of a WGMMA result."""

SCORES = plgpu.Layout.WGMMA
"""A WGMMA result."""

WARPGROUP = "warpgroup"
"""Name of the axis that numbers the warpgroups of a program."""

SHARED_BYTES = 227 * 1024
"""Shared memory that a program of a Hopper GPU may have."""

MOST_PROGRAMS = 2**16 - 1
"""Of a grid, along all axes but the last."""

SWIZZLE = 128
"""Bytes of the rows that TMA and WGMMA permute, so that no banks conflict."""


def shared_tile(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory for tiles that TMA fills and WGMMA reads."""
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def shared_numbers(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Shared memory for numbers that TMA fills and threads read."""
    return plgpu.SMEM(shape, dtype)


def full_rows(rows: int, value: float) -> jax.Array:
    """(rows,) equal numbers."""
    return plgpu.layout_cast(jnp.full((rows,), value, jnp.float32), ROWS)


def load_rows(ref: jax.Ref) -> jax.Array:
    """(rows,) from global memory."""
    return plgpu.load(ref, layout=ROWS, optimized=False)


def load_tile(ref: jax.Ref) -> jax.Array:
    """(rows, columns) from global memory, in sectors of 32 bytes."""
    return plgpu.load(ref, layout=SCORES, optimized=False)


def load_columns(ref: jax.Ref) -> jax.Array:
    """(columns,) from shared memory."""
    return plgpu.load(ref, layout=COLUMNS, optimized=False)


def over_rows(x: jax.Array, rows: int) -> jax.Array:
    """(columns,) -> (rows, columns)."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def row_numbers(rows: int, columns: int) -> jax.Array:
    """int32 (rows, columns)."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), 0, layout=SCORES)


def over_columns(x: jax.Array, columns: int) -> jax.Array:
    """(rows,) -> (rows, columns)."""
    return lax.broadcast_in_dim(x, (x.shape[0], columns), [0])


def column_numbers(rows: int, columns: int) -> jax.Array:
    """int32 (rows, columns)."""
    return plgpu.broadcasted_iota(jnp.int32, (rows, columns), 1, layout=SCORES)


@dataclass(frozen=True)
class Registers:
    """A result that products of an operand in registers are added to."""

    def scratch(self, warpgroups: int, rows: int, columns: int) -> tuple:
        """Memory of the program that it needs."""
        return ()

    def run(
        self, scratch: tuple, warpgroup: jax.Array, shape: tuple, body: Callable
    ) -> Any:
        """Calls `body` with a result of zeros."""
        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))

    def add_product(self, result: Any, a: jax.Array, b: jax.Ref) -> None:
        """Starts adding a · b."""
        plgpu.wgmma(result, a, b)

    def scale(self, result: Any, factor: jax.Array) -> None:
        """Multiplies each row, (rows,), once the products are done."""
        result[...] = result[...] * over_columns(factor, result.shape[1])

    def shared_sum(self, total: jax.Array, programs: int) -> jax.Ref:
        """A total in global memory that so many programs add to."""
        return jax.new_ref(total)

    def share_of(self, shared_sum: jax.Ref, program: jax.Array) -> jax.Ref:
        """What a program adds to."""
        return shared_sum

    def add_out(self, source: jax.Ref, target: jax.Ref) -> None:
        """Starts adding shared to global memory, by TMA, whoever else adds there."""
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

    def total(self, shared_sum: jax.Ref) -> jax.Array:
        """The total, once all have added."""
        return jax.freeze(shared_sum)


@dataclass(frozen=True)
class Emulated:
    """What `Registers` does, in shared memory and at once, for the interpreter."""

    def scratch(self, warpgroups: int, rows: int, columns: int) -> tuple:
        return (plgpu.SMEM((warpgroups, rows, columns), jnp.float32),)

    def run(
        self, scratch: tuple, warpgroup: jax.Array, shape: tuple, body: Callable
    ) -> Any:
        result = scratch[0].at[warpgroup]
        result[...] = jnp.zeros(shape, jnp.float32)
        return body(result)

    def add_product(self, result: jax.Ref, a: jax.Array, b: jax.Ref) -> None:
        product = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        result[...] = result[...] + product
        plgpu.commit_smem()  # TMA writes where this has read

    def scale(self, result: jax.Ref, factor: jax.Array) -> None:
        result[...] = result[...] * over_columns(factor, result.shape[1])

    def shared_sum(self, total: jax.Array, programs: int) -> jax.Ref:
        parts = jnp.zeros((programs, *total.shape), total.dtype)
        return jax.new_ref(parts.at[0].set(total))

    def share_of(self, shared_sum: jax.Ref, program: jax.Array) -> jax.Ref:
        return shared_sum.at[program]

    def add_out(self, source: jax.Ref, target: jax.Ref) -> None:
        target[...] = target[...] + source[...]

    def total(self, shared_sum: jax.Ref) -> jax.Array:
        return jax.freeze(shared_sum).sum(axis=0)


def full_tile(shape: tuple[int, int], value: float) -> jax.Array:
    """(rows, columns) equal numbers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), SCORES)


def with_product(shape: tuple[int, int], body: Callable) -> Any:
    """Calls `body` with a product to be computed."""
    return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))


def with_products(shape: tuple[int, int], count: int, body: Callable) -> Any:
    """Calls `body` with several products to be computed."""
    return pl.run_scoped(body, *[plgpu.ACC(shape, jnp.float32)] * count)


def scores(q: jax.Ref, keys: jax.Ref) -> jax.Array:
    """q · keysᵀ, (rows, columns)."""

    def body(product):
        plgpu.wgmma(product, q, keys.transpose((1, 0)))
        return product[...]

    return with_product((q.shape[0], keys.shape[0]), body)


def drain(free: jax.Ref, count: jax.Array, stages: int) -> None:
    """Waits for the last arrivals at barriers that `count` steps have used in turn.

    Nobody needs these. But the interpreter wants to see every arrival waited for.
    """

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(step):
        wait(free.at[lax.rem(step, jnp.int32(stages))])


def kernel(
    body: Callable,
    *,
    name: str,
    out_type: Any,
    scratch_types: Any,
    grid: dict[str, int],
    warpgroups: int,
    interpret: Interpreter | None,
) -> Callable:
    """A kernel that runs `body` in each warpgroup of each program of a grid.

    The last axis is the fastest, and may be longer than MOST_PROGRAMS; if another one
    is, it becomes the last.
    """
    *others, _ = grid.values()
    if max(others) > MOST_PROGRAMS:
        grid = dict(sorted(grid.items(), key=lambda axis: axis[1]))
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name=WARPGROUP,
        kernel_name=name,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Each warpgroup synchronises itself with others by the barriers it names.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
