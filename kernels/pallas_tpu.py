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

from kernels import tpu_backward as backward_kernel
from kernels import tpu_forward as forward_kernel
from kernels.block_sizes import TPU_BACKWARD, TPU_FORWARD, BlockSizes, TpuBlocks
from kernels.merge import Partial
from kernels.tiles import key_ranges, query_ranges
from kernels.tiling import Tiling
from kernels.tpu_softmax import NOTHING, ForwardTile
from kernels.tpu_tile import LANES

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
      NotImplementedError: there is no TPU to compile for.
    """
    chip = _checked_chip(launch.chip, q.dtype)
    blocks = launch.blocks or _blocks(TPU_FORWARD, chip, q)
    tiling, blocks = _cut(blocks, chip, q, k, start, block_sizes)
    start, stop = (_extended(tiling, bound) for bound in (start, stop))
    operands = forward_kernel.Operands(
        _flat(key_ranges(start, stop, tiling.block_q, tiling.block_k)),
        *_flat(_edges_of_sub_blocks(tiling, blocks.exact_rows, start, stop)),
        _row_bounds(tiling, start, stop),
        tiling.split_heads(_operand(q, chip)),
        *(tiling.split_keys(_operand(x, chip)) for x in (k, v)),
        _split_carry(tiling, chip, carry),
    )
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
        chip,
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
    blocks = launch.blocks or _blocks(TPU_BACKWARD, chip, q)
    tiling, blocks = _cut(blocks, chip, q, k, start, block_sizes)
    start, stop = (_extended(tiling, bound) for bound in (start, stop))
    # Weights come out times the scale, which dq and dk then need no more. Its sign goes
    # with the keys. Rows that see nothing get an lse that no weight survives.
    sign, magnitude = np.sign(scale).astype(k.dtype), abs(scale) or 1.0
    lse = lse * LOG2_E - math.log2(magnitude)
    lse = jnp.where(lse == -jnp.inf, -NOTHING, lse)
    rows = (tiling.split_rows(x) for x in (lse, delta))
    operands = backward_kernel.Operands(
        _flat(query_ranges(start, stop, tiling.block_q, tiling.block_k, k.shape[1])),
        *_flat(_edges_of_sub_blocks(tiling, blocks.exact_rows, start, stop)),
        *(tiling.split_keys(_operand(x, chip)) for x in (k * sign, v)),
        *(tiling.split_heads(_operand(x, chip)) for x in (q, d_out)),
        jnp.stack(tuple(rows), 3),
        jnp.stack([tiling.split_bounds(start), tiling.split_bounds(stop)], 2),
        tiling.split_heads(_padded(dq, chip)),
    )
    tile = backward_kernel.BackwardTile(
        blocks.rows,
        blocks.exact_rows,
        blocks.live_columns,
        magnitude * LOG2_E,
        _precision(q.dtype),
    )
    dq, dk, dv = backward_kernel.backward_call(
        tile,
        operands,
        chip,
        cost_estimate=_cost(tiling, q.shape[-1], 5, operands),
        interpret=launch.interpret,
    )
    depth = q.shape[-1]
    dq = tiling.join_heads(dq)[..., :depth]
    dk, dv = (tiling.join_keys(x)[..., :depth] for x in (dk, dv))
    return dq, dk * np.sign(scale), dv / magnitude


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


def _blocks(
    table: dict[str, TpuBlocks], chip: pltpu.TpuInfo, q: jax.Array
) -> TpuBlocks:
    """The table's choice, which is for bfloat16 rows of up to 128 numbers.

    A chip newer than the table is cut for like v6e. Where vector memory is small, tiles
    of wider rows are smaller.
    """
    blocks = table.get(str(chip.chip_version), table["v6e"])
    width = -(-q.shape[-1] // LANES) * q.dtype.itemsize // 2
    return blocks if chip.vmem_capacity_bytes > 2**25 else blocks.smaller(width)


def _lanes(chip: pltpu.TpuInfo) -> int:
    """What rows of 4-byte numbers in HBM have to be a multiple of.

    A v3 addresses HBM in words of 1 KiB.
    """
    return 2 * LANES if chip.generation < 4 else LANES


def _cut(
    blocks: TpuBlocks,
    chip: pltpu.TpuInfo,
    q: jax.Array,
    k: jax.Array,
    start: jax.Array,
    sizes: BlockSizes | None,
) -> tuple[Tiling, TpuBlocks]:
    group = q.shape[2] // k.shape[2]
    sizes, blocks = blocks.fit(q.shape[1], k.shape[1], group, _lanes(chip), sizes)
    tiling = Tiling.of(q, k, start, sizes)
    return tiling._replace(block_q=sizes.block_q, block_k=sizes.block_k), blocks


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
    """Float32 (M, query tiles, 2, R / LANES, LANES)."""
    bounds = jnp.stack([tiling.split_bounds(start), tiling.split_bounds(stop)], 2)
    bounds = bounds.reshape(*bounds.shape[:3], -1, LANES)
    return bounds.astype(jnp.float32)


def _operand(x: jax.Array, chip: pltpu.TpuInfo) -> jax.Array:
    """In a type that the matrix unit takes, the head size padded to whole lanes."""
    if not chip.is_matmul_supported(x.dtype, x.dtype):
        x = x.astype(jnp.float32)
    return _padded(x, chip)


def _padded(x: jax.Array, chip: pltpu.TpuInfo) -> jax.Array:
    more = -x.shape[-1] % _lanes(chip)
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
