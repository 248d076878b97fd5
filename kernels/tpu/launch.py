"""Flash attention on a TPU: the kernels behind the signature of `reference`.

Here operands are cut into tiles, as `tiling` says, and the kernels launched: see
`tpu_forward` and `tpu_backward`. What a query sees arrives as intervals, from which the
tiles to visit are counted in XLA, outside of the kernels.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..block_sizes import BlockSizes
from ..merge import Partial
from ..precision import gradient_factors
from ..tile_layout import Tiling
from ..tile_ranges import key_ranges, query_ranges
from . import backward as backward_kernel
from . import forward as forward_kernel
from .block_sizes import TPU_BACKWARD, TPU_FORWARD, TpuBlocks
from .cut import Cut, choose_cut, row_lanes
from .softmax import NOTHING, ForwardTile
from .tile import LANES, as_floats, check_smem, compiler_params, vmem_limit

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Launch:
    """How a kernel is run.

    chip: the TPU that it is compiled for; the one of this program unless given.
    blocks: how its work is cut; as is best for the chip unless given.
    interpret: whether (or how) Pallas runs the kernel's steps on any device, for tests.
    """

    chip: pltpu.TpuInfo | None = None
    blocks: TpuBlocks | None = None
    interpret: bool | pltpu.InterpretParams = False


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
    launch: Launch = Launch(),
) -> Partial:
    """Attention of every query to the key slots [start, stop): see `reference`.

    block_sizes: those of a tile; `launch.blocks` unless given.

    Raises:
      ValueError: a type that TPUs do not multiply, or tiles that do not fit the chip.
      NotImplementedError: there is no TPU to compile for, or it has too little memory
        for any tiles, or for the bounds of so many.
    """
    chip = _checked_chip(launch.chip, q.dtype)
    cut = cut_forward(chip, q, k, (launch.blocks, block_sizes), carry is not None)
    blocks, k, v = cut.blocks, cut.repeated(k), cut.repeated(v)
    tiling = cut.tiling(q, k, start)
    start, stop = (_extended(tiling, bound) for bound in (start, stop))
    operands = forward_kernel.Operands(
        _flat(key_ranges(start, stop, tiling.block_q, tiling.block_k)),
        *_flat(_edges_of_sub_blocks(tiling, blocks.exact_rows, start, stop)),
        _row_bounds(tiling, start, stop),
        tiling.split_heads(_operand(q, chip)),
        *(tiling.split_keys(_operand(x, chip)) for x in (k, v)),
        _split_carry(tiling, chip, carry),
    )
    check_smem(chip, *operands.ranges, operands.first, operands.last)
    tile = ForwardTile(
        blocks.rows,
        blocks.columns,
        blocks.ahead,
        blocks.behind,
        blocks.exact_rows,
        blocks.live_columns,
        scale * LOG2_E,
        _precision(q.dtype),
    )
    out, lse = forward_kernel.forward_call(
        tile,
        operands,
        compiler_params=compiler_params(chip, "parallel"),
        cost_estimate=_cost(tiling, q.shape[-1], 2, operands),
        interpret=launch.interpret,
    )
    out = tiling.join_heads(out)[..., : q.shape[-1]]
    lse = tiling.join_rows(lse.reshape(*lse.shape[:3], blocks.stacked_rows))
    return out, lse / LOG2_E


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_out: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
    launch: Launch = Launch(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the attention to these keys: see `reference`.

    block_sizes, launch: as in `forward`, and so is what is raised.
    """
    chip = _checked_chip(launch.chip, q.dtype)
    cut, is_dq_resident = cut_backward(chip, q, k, (launch.blocks, block_sizes))
    blocks, k, v = cut.blocks, cut.repeated(k), cut.repeated(v)
    tiling = cut.tiling(q, k, start)
    start, stop = (_extended(tiling, bound) for bound in (start, stop))
    # Weights come out times the scale, which dq and dk then need no more, unless it is
    # no ordinary number. Its sign goes with the keys.
    before, after = (abs(x) for x in gradient_factors(scale, q.dtype))
    sign, magnitude = np.sign(scale).astype(k.dtype), before or 1.0
    rows = (tiling.split_rows(x) for x in (_less(lse, magnitude), delta))
    operands = backward_kernel.Operands(
        _flat(query_ranges(start, stop, tiling.block_q, tiling.block_k, k.shape[1])),
        *_flat(_edges_of_sub_blocks(tiling, blocks.exact_rows, start, stop)),
        *(tiling.split_keys(_operand(x, chip)) for x in (k * sign, v)),
        *(tiling.split_heads(_operand(x, chip)) for x in (q, d_out)),
        jnp.stack(tuple(rows), 3),
        jnp.stack([tiling.split_bounds(start), tiling.split_bounds(stop)], 2),
        tiling.split_heads(_padded(dq if after == 1 else jnp.zeros_like(dq), chip)),
    )
    check_smem(chip, *operands.ranges, operands.first, operands.last)
    tile = backward_kernel.BackwardTile(
        blocks.rows,
        blocks.exact_rows,
        blocks.live_columns,
        abs(scale) * LOG2_E,
        _precision(q.dtype),
    )
    share, dk, dv = backward_kernel.backward_call(
        tile,
        operands,
        is_dq_resident,
        compiler_params=compiler_params(chip, "arbitrary"),
        cost_estimate=_cost(tiling, q.shape[-1], 5, operands),
        interpret=launch.interpret,
    )
    depth = q.shape[-1]
    share = tiling.join_heads(share)[..., :depth]
    dk, dv = (cut.summed(tiling.join_keys(x)[..., :depth]) for x in (dk, dv))
    dq = share if after == 1 else dq + after * share
    return dq, dk * (after * np.sign(scale)), dv / magnitude


def _checked_chip(chip: pltpu.TpuInfo | None, dtype: jnp.dtype) -> pltpu.TpuInfo:
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(
            f"pallas_tpu computes in bfloat16 or float32, got {dtype}: cast q, k and v"
        )
    if chip is not None:
        return chip
    try:
        return pltpu.get_tpu_info()
    except ValueError as error:
        raise NotImplementedError(
            "pallas_tpu needs a TPU, or a mesh that describes one: name another "
            "implementation, or none"
        ) from error


def cut_forward(
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    asked: tuple[TpuBlocks | None, BlockSizes | None],
    has_carry: bool,
) -> Cut:
    """How it is cut. asked, and what is raised: as in `choose_cut`."""
    row = _row(q, chip)

    def held_bytes(cut: Cut) -> int:
        return forward_kernel.held_bytes(cut.blocks, cut.heads, row, has_carry)

    return choose_cut(TPU_FORWARD, chip, q, k, asked, held_bytes)


def cut_backward(
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    asked: tuple[TpuBlocks | None, BlockSizes | None],
) -> tuple[Cut, bool]:
    """As `cut_forward`, and whether dq of a head stays in vector memory."""
    row, limit = _row(q, chip), vmem_limit(chip)

    def memory(cut: Cut) -> backward_kernel.Memory:
        query_tiles = -(-q.shape[1] // cut.sizes.block_q)
        return backward_kernel.Memory.of(cut.blocks, row, query_tiles, limit)

    cut = choose_cut(TPU_BACKWARD, chip, q, k, asked, lambda cut: memory(cut).held)
    return cut, memory(cut).is_dq_resident


def _row(q: jax.Array, chip: pltpu.TpuInfo) -> jax.ShapeDtypeStruct:
    """A row of operands, of a type that is multiplied, padded to whole lanes."""
    is_supported = chip.is_matmul_supported(q.dtype, q.dtype)
    depth = -(-q.shape[-1] // row_lanes(chip)) * row_lanes(chip)
    return jax.ShapeDtypeStruct((depth,), q.dtype if is_supported else jnp.float32)


def _less(lse: jax.Array, factor: float) -> jax.Array:
    """For exponents of 2, with which weights come out times a factor.

    Rows that see nothing get one that no weight survives.
    """
    lse = lse * LOG2_E - math.log2(factor)
    return jnp.where(lse == -jnp.inf, -NOTHING, lse)


def _extended(tiling: Tiling, bound: jax.Array) -> jax.Array:
    """(M, T) -> (M, whole tiles): rows after the end see what the last row does."""
    more = tiling.query_tiles * tiling.block_q - bound.shape[1]
    return jnp.pad(bound, ((0, 0), (0, more)), mode="edge")


def _flat(arrays):
    return jax.tree.map(jnp.ravel, arrays)


def _edges_of_sub_blocks(
    tiling: Tiling, rows: int, start: jax.Array, stop: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Least start and largest stop of sub-blocks, (M, query tiles, R / rows) each."""
    shape = tiling.bound_rows, tiling.query_tiles, -1, rows
    first = tiling.split_bounds(start).reshape(shape).min(axis=-1)
    return first, tiling.split_bounds(stop).reshape(shape).max(axis=-1)


def _row_bounds(tiling: Tiling, start: jax.Array, stop: jax.Array) -> jax.Array:
    """(M, query tiles, 2, R / LANES, LANES)."""
    bounds = jnp.stack([tiling.split_bounds(start), tiling.split_bounds(stop)], 2)
    bounds = bounds.reshape(*bounds.shape[:3], -1, LANES)
    return as_floats(bounds)


def _operand(x: jax.Array, chip: pltpu.TpuInfo) -> jax.Array:
    return _padded(x.astype(_row(x, chip).dtype), chip)


def _padded(x: jax.Array, chip: pltpu.TpuInfo) -> jax.Array:
    more = _row(x, chip).shape[0] - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])


def _split_carry(
    tiling: Tiling, chip: pltpu.TpuInfo, carry: Partial | None
) -> tuple[jax.Array, ...]:
    if carry is None:
        return ()
    out, lse = carry
    lse = tiling.split_rows(jnp.maximum(lse * LOG2_E, NOTHING))
    lse = lse.reshape(*lse.shape[:-1], -1, LANES)
    return tiling.split_heads(_padded(out, chip)), lse


def _precision(dtype: jnp.dtype) -> lax.Precision:
    """True float32 products for float32; those of bfloat16 are exact in any case."""
    exact = dtype == jnp.float32
    return lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT


def _cost(
    tiling: Tiling, depth: int, products: int, operands: tuple
) -> pl.CostEstimate:
    """Of all queries with all keys, the most a mask may leave; operands read once."""
    heads = tiling.kv_heads * tiling.group
    scores = tiling.batch * heads * tiling.length * tiling.keys
    arrays = jax.tree.leaves(operands)
    return pl.CostEstimate(
        flops=2 * products * scores * depth,
        transcendentals=scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )
