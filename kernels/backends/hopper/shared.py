"""Sizes, loads, the mask and the launcher that the Hopper kernels share.

The kernels call Pallas Mosaic GPU by its own names, as `plgpu`; JAX calls these
unstable, so an upgrade of JAX begins in this folder. A program of a kernel is three
warpgroups of 128 threads: one producer, whose TMA copies tiles to shared memory (SMEM),
and two consumers, whose WGMMAs multiply them. Both run asynchronously: a TMA completes
on a barrier, WGMMAs in groups that complete in order, `plgpu.wgmma_wait(n)` leaving n.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from ...masks import in_interval
from ...precision import LOG2_E

ROWS = 64
"""Rows of one WGMMA: those of a tile that a consumer warpgroup computes."""

CONSUMERS = 2
"""Consumer warpgroups of a program, numbered 0 and 1; the producer is number 2."""

BLOCK_Q = CONSUMERS * ROWS
"""Queries of a tile of the forward and dq kernels."""

EPILOGUE_COLUMNS = 64
"""Columns of a result that are written at once, as registers are few."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Registers of a thread, once the producer has given up what it does not need."""

SHARED_BYTES = 227 * 1024
"""Shared memory that a program of a Hopper GPU may have."""

MAX_PROGRAMS = 2**16 - 1
"""Programs of a grid along each axis but the last, at most."""

SWIZZLE = 128
"""Bytes of the rows that TMA and WGMMA permute, so that no banks conflict."""

WGMMA_ROW = plgpu.Layout.WGMMA.reduce(1)
"""Registers of one number for each row of a WGMMA accumulator."""

WGMMA_COL = plgpu.Layout.WGMMA.reduce(0)
"""Registers of one number for each column of a WGMMA accumulator."""

MASKED = -(2.0**60)
"""1 + tanh where masked: P is 0, as with -inf, but 0 times its square is never nan."""

WARPGROUP = "warpgroup"
"""Axis that numbers the warpgroups of a program."""


def tiled_smem(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """Returns the type of SMEM tiles that TMA fills and WGMMA reads."""
    # WGMMA reads tiles of 8 rows, each as wide as the bytes that are swizzled together.
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def constant(shape: tuple[int, ...], value: float, layout: Any) -> jax.Array:
    """Fills float32 registers."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def load(ref: jax.Ref, layout: Any = plgpu.Layout.WGMMA) -> jax.Array:
    """Loads from GMEM (in sectors of 32 bytes) or SMEM to registers."""
    return plgpu.load(ref, layout=layout, optimized=False)


def broadcast_rows(x: jax.Array, rows: int) -> jax.Array:
    """Broadcasts [n] -> [rows, n]."""
    return lax.broadcast_in_dim(x, (rows, x.shape[0]), [1])


def broadcast_cols(x: jax.Array, cols: int) -> jax.Array:
    """Broadcasts [n] -> [n, cols]."""
    return lax.broadcast_in_dim(x, (x.shape[0], cols), [0])


def mask(
    s: jax.Array,
    first_key: jax.Array,
    key_axis: int,
    bounds: Iterable[jax.Array],
    fill: float = -jnp.inf,
) -> jax.Array:
    """Sets s to `fill` outside of each query's keys [k_start, k_end).

    s: scores or exponents, [64, n], with keys along `key_axis`, from `first_key` on.
    bounds: k_start and k_end, one number a query each; may load them when asked.
    """
    k = first_key + plgpu.broadcasted_iota(
        jnp.int32, s.shape, key_axis, layout=plgpu.Layout.WGMMA
    )
    # An iterator loads each bound where it is broadcast, so fewer registers are live.
    k_start, k_end = (
        lax.broadcast_in_dim(bound, s.shape, [1 - key_axis]) for bound in bounds
    )  # as s, both
    return jnp.where(in_interval(k_start, k, k_end), s, fill)


def masked(s: jax.Array, first_key: jax.Array, bounds: Any) -> jax.Array:
    """Returns `mask` of keys along the columns, by one comparison a score.

    It is k - k_start < k_end - k_start, of unsigned numbers; counted in SASS, it saves
    the forward a third of the mask. In the backward it spills, or saves nothing.
    """
    k_start, k_end = bounds  # [64] each
    # Keys before k_start have a number below 0, which as unsigned is above any count.
    offset = (first_key - k_start).astype(jnp.uint32)  # [64]
    count = jnp.maximum(k_end - k_start, 0).astype(jnp.uint32)  # [64]
    layout = plgpu.Layout.WGMMA
    k = plgpu.broadcasted_iota(jnp.uint32, s.shape, 1, layout=layout)  # as s
    offset = broadcast_cols(offset, s.shape[1])  # as s
    count = broadcast_cols(count, s.shape[1])  # as s
    return jnp.where(k + offset < count, s, -jnp.inf)


@dataclass(frozen=True)
class NativeOps:
    """WGMMAs that read an operand in registers, and TMA that adds.

    Pallas' interpreter knows neither: `emulation.EmulatedOps` stands in for them.
    """

    def acc_smem(self, rows: int, columns: int) -> Any:
        """Returns the type of the SMEM that `run_with_acc` needs, None for none."""
        return None

    def run_with_acc(
        self, smem: Any, wg: jax.Array, shape: tuple[int, int], body: Callable
    ) -> Any:
        """Calls body(acc) with a float32 accumulator of zeros, for consumer wg."""
        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))

    def wgmma(self, acc: Any, a: jax.Array, b: jax.Ref) -> None:
        """Issues acc += a · b as a group. a: registers. b: SMEM."""
        plgpu.wgmma(acc, a, b)

    def rescale(self, acc: Any, factor: jax.Array) -> None:
        """Multiplies the rows of acc [64, d] by factor [64]; no WGMMA is in flight."""
        acc[...] = acc[...] * broadcast_cols(factor, acc.shape[1])

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """Returns 1 / x [64, n], off by a unit in the last place, in one step."""
        layout = plgpu.Layout.WGMMA
        out = plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)

        @plgpu.inline_mgpu(arg_types=(layout,), return_type=out)
        def inlined(_, x):
            def approximate(value, _):
                return nvvm.rcp_approx_ftz_f(value)

            return x.foreach(approximate, create_array=True)

        return inlined(x)

    def new_sum(self, initial: jax.Array, programs: int) -> jax.Ref:
        """Returns a sum in GMEM that programs add to."""
        return jax.new_ref(initial)

    def addend(self, sum_ref: jax.Ref, program: jax.Array) -> jax.Ref:
        """Returns where a program adds to the sum."""
        return sum_ref

    def copy_smem_to_gmem_add(self, source: jax.Ref, target: jax.Ref) -> None:
        """Starts target += source by TMA, atomically."""
        plgpu.copy_smem_to_gmem(source, target, reduction_op="add")

    def freeze_sum(self, sum_ref: jax.Ref) -> jax.Array:
        """Returns the sum, once all programs have added."""
        return jax.freeze(sum_ref)


def one_plus_tanh(x: jax.Array, scale: float, ops: NativeOps) -> jax.Array:
    """Returns 1 + tanh(scale · x) [64, n], off by 2⁻²¹ at most; 0 and 2 at infinity.

    The GPU's own tanh is off by 2⁻¹¹: too much for a cap of 50.
    """
    return ops.reciprocal(0.5 + jnp.exp2(x * (-2 * LOG2_E * scale) - 1))


def probabilities(
    config: Any,
    s: jax.Array,
    lse: jax.Array,
    masked: Callable[[jax.Array, float], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns P and P · ds'/ds [64, n] each, where s' are scores with a soft cap.

    config: of a backward kernel. s: Q Kᵀ or its transpose [64, n]. lse: [64, n].
    masked: sets what is not visible to a number.
    """
    if config.tanh_scale is None:
        # Exponents are masked, and not P: that spills nothing.
        p = jnp.exp2(masked(s * config.scale - lse, -jnp.inf))  # [64, n]
        return p, p
    t = masked(one_plus_tanh(s, config.tanh_scale, config.ops), MASKED)  # [64, n]
    p = jnp.exp2(t * config.scale - lse)  # [64, n]
    # 1 - tanh² = t (2 - t), whose product comes first: that spills nothing.
    return p, p * (t * (2 - t))


def by_role(consume: Callable[[jax.Array], None], produce: Callable[[], None]) -> None:
    """Runs consume(its number) in a consumer warpgroup, produce() in the producer."""
    wg = lax.axis_index(WARPGROUP)

    # The increase waits for registers that the producer gives up. All three must fit
    # into the 65,536 of a multiprocessor: 128 · (2 · 240 + 24) = 64,512.
    @pl.when(wg < CONSUMERS)
    def _():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
        consume(wg)

    @pl.when(wg == CONSUMERS)
    def _():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
        produce()


def empty_stage(n: jax.Array, stages: int, empty: jax.Ref) -> jax.Array:
    """Returns the stage of tile n, once consumers are done with tile n - stages."""
    stage = lax.rem(n, jnp.int32(stages))
    pl.when(n >= stages)(lambda: plgpu.barrier_wait(empty.at[stage]))
    return stage


def wait_for_last_arrivals(count: jax.Array, stages: int, *empty: jax.Ref) -> None:
    """Waits for the arrivals of the last `stages` of `count` tiles.

    No copy needs them, but Pallas' interpreter requires a wait for every arrival.
    """

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(n):
        for barrier in empty:
            plgpu.barrier_wait(barrier.at[lax.rem(n, jnp.int32(stages))])


def run_kernel(
    body: Callable,
    operands: Any,
    *,
    name: str,
    out_type: Any,
    smem: NamedTuple,
    grid: dict[str, int],
    interpret: plgpu.InterpretGPUParams | None,
) -> Any:
    """Runs `body` in each warpgroup of each program of a grid, and returns its results.

    body: (operands, refs of the results, smem), operands a tree as they are given.

    The last axis is the fastest, and may be longer than MAX_PROGRAMS; if another one
    is, it becomes the last.
    """
    leaves, tree = jax.tree.flatten(operands)

    def on_refs(*refs: jax.Ref) -> None:
        inputs = jax.tree.unflatten(tree, refs[: len(leaves)])
        body(inputs, *refs[len(leaves) :])  # then results, and smem as the last

    *others, _ = grid.values()
    if max(others) > MAX_PROGRAMS:
        # Programs find their axes by name, so that any order computes the same.
        grid = dict(sorted(grid.items(), key=lambda axis: axis[1]))
    call = plgpu.kernel(
        on_refs,
        out_type=out_type,
        scratch_types=[smem],
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=CONSUMERS + 1,
        thread_name=WARPGROUP,
        kernel_name=name,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Warpgroups synchronise by the barriers that the kernels name.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,
        ),
    )
    return call(*leaves)
