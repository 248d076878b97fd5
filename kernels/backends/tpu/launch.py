"""Flash attention on a TPU: the kernels behind the signature of `reference`.

Splits the operands into tiles (`tile_layout`), computes in XLA which tiles are live,
from the intervals of keys that queries attend to, and runs the kernels of `forward`
and `backward`. Letters of shapes: see `kernels.backends.tpu`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...merge import Partial, added
from ...precision import LOG2_E
from ..block_sizes import BlockSizes
from ..tile_layout import Tiling
from ..tile_ranges import key_ranges, query_ranges
from . import backward as backward_kernel
from . import diagonal
from . import forward as forward_kernel
from .block_sizes import (
    TPU_BACKWARD,
    TPU_BACKWARD_CAPPED,
    TPU_FORWARD,
    TPU_FORWARD_CAPPED,
    TpuBlocks,
)
from .cut import Cut, choose_cut, row_lanes, vmem_limit
from .softmax import NOTHING
from .tile_config import SoftCap, TileConfig
from .vector import buffer_bytes


@dataclass(frozen=True)
class Launch:
    """Chip, blocks and interpreter of a kernel.

    chip: the TPU that it is compiled for; the one of this program unless given.
    blocks: block sizes; the best ones known for the chip unless given.
    interpret: whether (or how) Pallas interprets the kernel on any device, for tests.
    """

    chip: pltpu.TpuInfo | None = None
    blocks: TpuBlocks | None = None
    interpret: bool | pltpu.InterpretParams = False


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    block_sizes: BlockSizes | None = None,
    carry: Partial | None = None,
    launch: Launch = Launch(),
) -> Partial:
    """Attends from every query to the keys [k_start, k_end): see `reference`.

    block_sizes: of a tile; `launch.blocks` unless given.

    Raises:
      ValueError: a type that TPUs do not multiply, or tiles that do not fit the chip.
      NotImplementedError: there is no TPU to compile for, or it has too little memory
        for any tiles, or for the bounds of all of them; or a soft cap out of range.
    """
    chip = _checked_chip(launch.chip, q.dtype)
    cap = None if soft_cap is None else SoftCap.of(soft_cap, chip, q.dtype)
    offset = cap.offset / LOG2_E if cap else 0.0
    wanted = launch.blocks, block_sizes
    cut = cut_forward(chip, q, k, carry is not None, *wanted, is_capped=bool(cap))
    k, v = cut.repeat_heads(k), cut.repeat_heads(v)
    tiling = cut.tiling(q, k, k_start)
    k_start, k_end = _pad_rows(tiling, k_start), _pad_rows(tiling, k_end)
    ranges = key_ranges(k_start, k_end, tiling.block_q, tiling.block_k)
    min_k_start, max_k_end = _sub_block_bounds(tiling, cut.blocks, k_start, k_end)
    operands = forward_kernel.Operands(
        key_tile_ranges=jax.tree.map(jnp.ravel, ranges),  # 4 x [M * query tiles]
        first_ends=_first_ends(tiling, cut.blocks, chip, k_start, k_end),
        min_k_start=min_k_start,  # [M * query tiles * sub-blocks]
        max_k_end=max_k_end,  # [M * query tiles * sub-blocks]
        row_bounds=cut.packed(_stack_bounds(tiling, k_start, k_end)),
        q=tiling.split_heads(_operand(q, chip)),  # [M, X, G, query tiles * block_q, D]
        k=tiling.split_keys(_operand(k, chip)),  # [M, X, key tiles, block_k, D]
        v=tiling.split_keys(_operand(v, chip)),  # [M, X, key tiles, block_k, D]
        carry=_split_carry(cut, tiling, chip, carry, offset),
    )
    _check_smem(chip, (ranges, operands.first_ends, min_k_start, max_k_end))
    # The cores of a chip share out heads, or where there is one, its query tiles.
    is_in_order = q.shape[0] * k.shape[2] % chip.num_cores == 0
    out, lse = forward_kernel.forward_call(
        _tile_config(cut, scale, q.dtype, cap),
        operands,
        is_in_order,
        compiler_params=_compiler_params(
            chip, cut.blocks, "arbitrary" if is_in_order else "parallel"
        ),
        cost_estimate=_cost(tiling, q.shape[-1], 2, operands),
        interpret=launch.interpret,
    )
    out = cut.orientation.swap(out)  # [M, X, G, query tiles * block_q, D]
    out = tiling.join_heads(out)[..., : q.shape[-1]]  # (B, T, H, D)
    lse = lse.reshape(*lse.shape[:3], cut.blocks.stacked_rows)  # [M, X, query tiles, R]
    return out, tiling.join_rows(lse) / LOG2_E + offset


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
    block_sizes: BlockSizes | None = None,
    dq: jax.Array,
    dkv: tuple[jax.Array, jax.Array] | None = None,
    launch: Launch = Launch(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of the attention to these keys: see `reference`.

    block_sizes, launch, and what is raised: as in `forward`.
    """
    chip = _checked_chip(launch.chip, q.dtype)
    cap = None if soft_cap is None else SoftCap.of(soft_cap, chip, q.dtype)
    wanted = launch.blocks, block_sizes
    cut, is_dq_resident = cut_backward(chip, q, k, *wanted, is_capped=bool(cap))
    k, v = cut.repeat_heads(k), cut.repeat_heads(v)
    tiling = cut.tiling(q, k, k_start)
    k_start, k_end = _pad_rows(tiling, k_start), _pad_rows(tiling, k_end)
    ranges = query_ranges(k_start, k_end, tiling.block_q, tiling.block_k, k.shape[1])
    min_k_start, max_k_end = _sub_block_bounds(tiling, cut.blocks, k_start, k_end)
    lse = tiling.split_rows(_lse_in_base_2(lse, cap.offset if cap else 0.0))
    delta = tiling.split_rows(delta)  # [M, X, query tiles, R], as lse
    operands = backward_kernel.Operands(
        query_tile_ranges=jax.tree.map(jnp.ravel, ranges),  # 4 x [M * key tiles]
        min_k_start=min_k_start,  # [M * query tiles * sub-blocks]
        max_k_end=max_k_end,  # [M * query tiles * sub-blocks]
        first_ends=_first_ends(tiling, cut.blocks, chip, k_start, k_end),
        k=tiling.split_keys(_operand(k, chip)),  # [M, X, key tiles, block_k, D]
        v=tiling.split_keys(_operand(v, chip)),  # [M, X, key tiles, block_k, D]
        q=tiling.split_heads(_operand(q, chip)),  # [M, X, G, query tiles * block_q, D]
        do=tiling.split_heads(_operand(do, chip)),  # as q
        lse_delta=jnp.stack((lse, delta), 3),  # [M, X, query tiles, 2, R]
        row_bounds=_stack_bounds(tiling, k_start, k_end),  # [M, query tiles, 2, R]
        dq=cut.orientation.swap(tiling.split_heads(_pad_lanes(dq, chip))),
    )
    _check_smem(chip, (ranges, operands.first_ends, min_k_start, max_k_end))
    gradients = backward_kernel.backward_call(
        _tile_config(cut, scale, q.dtype, cap),
        operands,
        is_dq_resident,
        compiler_params=_compiler_params(chip, cut.blocks, "arbitrary"),
        cost_estimate=_cost(tiling, q.shape[-1], 5, operands),
        interpret=launch.interpret,
    )
    dq, dk, dv = (cut.orientation.swap(x) for x in gradients)
    dk, dv = (cut.sum_heads(tiling.join_keys(x)) for x in (dk, dv))  # (B, S, K, D)
    gradients = tiling.join_heads(dq), dk, dv  # dq (B, T, H, D)
    dq, dk, dv = (x[..., : q.shape[-1]] for x in gradients)
    return dq, *added(dkv, (dk, dv))


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
    has_carry: bool,
    blocks: TpuBlocks | None = None,
    sizes: BlockSizes | None = None,
    is_capped: bool = False,
) -> Cut:
    """Chooses the forward kernel's blocks; blocks, sizes, errors: as `choose_cut`."""
    row = _row(q, chip)

    def held_bytes(cut: Cut) -> int:
        return forward_kernel.held_bytes(cut, row, has_carry)

    table = TPU_FORWARD_CAPPED if is_capped else TPU_FORWARD
    return choose_cut(table, chip, q, k, held_bytes, blocks, sizes)


def cut_backward(
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    blocks: TpuBlocks | None = None,
    sizes: BlockSizes | None = None,
    is_capped: bool = False,
) -> tuple[Cut, bool]:
    """Chooses the backward kernel's blocks, and whether dq of a head stays in VMEM."""
    row, limit = _row(q, chip), vmem_limit(chip)

    def memory(cut: Cut) -> backward_kernel.Memory:
        query_tiles = -(-q.shape[1] // cut.sizes.block_q)
        return backward_kernel.Memory.of(cut.blocks, row, query_tiles, limit)

    def held_bytes(cut: Cut) -> int:
        return memory(cut).held

    table = TPU_BACKWARD_CAPPED if is_capped else TPU_BACKWARD
    cut = choose_cut(table, chip, q, k, held_bytes, blocks, sizes)
    return cut, memory(cut).is_dq_resident


def _row(x: jax.Array, chip: pltpu.TpuInfo) -> jax.ShapeDtypeStruct:
    """Returns a row of an operand, [D]: padded to whole lanes, of a matmul's type."""
    is_supported = chip.is_matmul_supported(x.dtype, x.dtype)
    depth = -(-x.shape[-1] // row_lanes(chip)) * row_lanes(chip)
    return jax.ShapeDtypeStruct((depth,), x.dtype if is_supported else jnp.float32)


def _operand(x: jax.Array, chip: pltpu.TpuInfo) -> jax.Array:
    return _pad_lanes(x.astype(_row(x, chip).dtype), chip)


def _pad_lanes(x: jax.Array, chip: pltpu.TpuInfo) -> jax.Array:
    more = _row(x, chip).shape[0] - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])


def _lse_in_base_2(lse: jax.Array, less: float) -> jax.Array:
    """Returns log2 of the sums less a number, so that P comes out times 2**less.

    Rows without keys get a number so large that P is 0.
    """
    lse = lse * LOG2_E - less
    return jnp.where(lse == -jnp.inf, -NOTHING, lse)


def _pad_rows(tiling: Tiling, bound: jax.Array) -> jax.Array:
    """Repeats the last row's bound after the end: (M, T) -> [M, whole query tiles].

    Bounds are kept within the keys: the compiled kernels do not check what they copy.
    """
    more = tiling.query_tiles * tiling.block_q - bound.shape[1]
    bound = jnp.clip(bound, 0, tiling.keys)
    return jnp.pad(bound, ((0, 0), (0, more)), mode="edge")


def _sub_block_bounds(
    tiling: Tiling, blocks: TpuBlocks, k_start: jax.Array, k_end: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns min k_start and max k_end, [M * query tiles * R / exact_rows] each."""
    shape = tiling.bound_rows, tiling.query_tiles, -1, blocks.exact_rows
    min_k_start = tiling.split_bounds(k_start).reshape(shape).min(axis=-1)
    max_k_end = tiling.split_bounds(k_end).reshape(shape).max(axis=-1)
    return min_k_start.ravel(), max_k_end.ravel()


def _first_ends(
    tiling: Tiling,
    blocks: TpuBlocks,
    chip: pltpu.TpuInfo,
    k_start: jax.Array,
    k_end: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns `diagonal.first_ends` of all query tiles, [M * query tiles].

    None where SMEM may not hold them beside the other bounds of tiles.
    """
    tiles = tiling.bound_rows * max(tiling.query_tiles, tiling.key_tiles)
    numbers = 5 + 2 * blocks.stacked_rows // blocks.exact_rows
    if 4 * numbers * tiles > _smem_bytes(chip):
        return ()
    ranges = key_ranges(k_start, k_end, tiling.block_q, tiling.block_k)
    shape = tiling.bound_rows, tiling.query_tiles, tiling.block_q
    bounds = k_start.reshape(shape), k_end.reshape(shape)
    rows, granule = np.arange(tiling.block_q), diagonal.granule(blocks)
    ends = diagonal.first_ends(
        granule, tiling.block_k, ranges, bounds, rows.astype(np.int32)
    )
    return (ends.ravel(),)


def _stack_bounds(tiling: Tiling, k_start: jax.Array, k_end: jax.Array) -> jax.Array:
    """Returns k_start and k_end of all rows: [M, query tiles, 2, R]."""
    return jnp.stack([tiling.split_bounds(k_start), tiling.split_bounds(k_end)], 2)


def _split_carry(
    cut: Cut, tiling: Tiling, chip: pltpu.TpuInfo, carry: Partial | None, offset: float
) -> forward_kernel.Carry | tuple[()]:
    if carry is None:
        return ()
    out, lse = carry
    lse = jnp.maximum((lse - offset) * LOG2_E, NOTHING)
    lse = tiling.split_rows(lse)  # [M, X, tiles, R]
    return forward_kernel.Carry(
        out=cut.orientation.swap(tiling.split_heads(_pad_lanes(out, chip))),
        lse=cut.packed(lse),
    )


def _tile_config(
    cut: Cut, scale: float, dtype: jnp.dtype, cap: SoftCap | None
) -> TileConfig:
    precision = _precision(dtype)
    return TileConfig(cut.blocks, scale * LOG2_E, precision, cap, cut.orientation)


def _precision(dtype: jnp.dtype) -> lax.Precision:
    """Returns that of true float32 matmuls; those of bfloat16 are exact in any case."""
    is_wide = dtype == jnp.float32
    return lax.Precision.HIGHEST if is_wide else lax.Precision.DEFAULT


def _check_smem(chip: pltpu.TpuInfo, bounds: Any) -> None:
    """Refuses bounds of more tiles than SMEM holds.

    Raises:
      NotImplementedError: the compiler would not find room.
    """
    needed, limit = buffer_bytes(bounds), _smem_bytes(chip)
    if needed > limit:
        raise NotImplementedError(
            f"the bounds of all tiles take {needed / 2**10:.1f} KiB, more than the "
            f"{limit / 2**10:.1f} KiB of scalar memory that a kernel has on TPU "
            f"{chip.chip_version}: shard the sequence, or a batch of rows with bounds "
            "of their own, over more devices"
        )


def _smem_bytes(chip: pltpu.TpuInfo) -> int:
    """Returns the bytes of SMEM for bounds: counts and the compiler take 2 KiB."""
    return chip.smem_capacity_bytes - 2**11


def _compiler_params(
    chip: pltpu.TpuInfo, blocks: TpuBlocks, tiles: str
) -> pltpu.CompilerParams:
    """Returns the parameters of a kernel with a grid of (batch, head, tile).

    tiles: "parallel", or "arbitrary" if those of a head must run in order on one core.
    """
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", tiles),
        vmem_limit_bytes=vmem_limit(chip),
        disable_bounds_checks=True,
        flags={"XLA_TPU_FORCE_LP_LLO_SCHEDULER": blocks.has_lp_scheduler},
    )


def _cost(tiling: Tiling, depth: int, matmuls: int, operands: tuple) -> pl.CostEstimate:
    """Counts all queries with all keys, the most of any mask; operands read once."""
    heads = tiling.kv_heads * tiling.group
    scores = tiling.batch * heads * tiling.length * tiling.keys
    return pl.CostEstimate(
        flops=2 * matmuls * scores * depth,
        transcendentals=scores,
        bytes_accessed=buffer_bytes(operands),
    )
