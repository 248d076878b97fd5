"""What all launches of a kernel on the same queries share: chip, tiles, and numbers."""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...masks import Array
from ...precision import LOG2_E
from ..tile_layout import Tiling
from ..tile_ranges import key_ranges, query_ranges
from .block_sizes import Cut, row_lanes, vmem_limit
from .bounds import Diagonals, TileNumbers
from .tile_config import SoftCap, TileConfig
from .vector import LANES, buffer_bytes


class TpuBounds(NamedTuple):
    """What the kernels read of the bounds of a step.

    numbers: `TileNumbers`, packed. bounds: k_start and k_end of rows that make up whole
      lanes, one head's or those of a few stacked heads: int32 [M, query tiles, 2, P].
    """

    numbers: jax.Array
    bounds: jax.Array


class Setup(NamedTuple):
    """A problem on a chip, cut into tiles.

    row: a row of an operand, [D]: padded to whole lanes, of a matmul's type.
    depth: numbers of a head, without the padding.
    interpret: whether (or how) Pallas interprets the kernel.
    """

    chip: pltpu.TpuInfo
    cut: Cut
    tiling: Tiling
    config: TileConfig
    row: jax.ShapeDtypeStruct
    depth: int
    interpret: bool | pltpu.InterpretParams

    @classmethod
    def of(
        cls,
        chip: pltpu.TpuInfo,
        cut: Cut,
        operands: tuple[jax.Array, jax.Array, Array],
        scores: tuple[float, SoftCap | None],
        interpret: bool | pltpu.InterpretParams,
    ) -> "Setup":
        """Builds the setup. operands: q, k and bounds. scores: scale and soft cap."""
        q, k, k_start = operands
        scale, cap = scores
        wide = q.dtype == jnp.float32  # matmuls of bfloat16 are exact in any case
        precision = lax.Precision.HIGHEST if wide else lax.Precision.DEFAULT
        config = TileConfig(cut.blocks, scale * LOG2_E, precision, cap, cut.orientation)
        # Of k the shape counts: it is that of the keys of any ring step.
        tiling = cut.tiling(q, jax.eval_shape(cut.repeat_heads, k), k_start)
        row = row_of(q, chip)
        return cls(chip, cut, tiling, config, row, q.shape[-1], interpret)

    @property
    def offset(self) -> float:
        """What the kernels' scores come out less."""
        return self.config.soft_cap.offset if self.config.soft_cap else 0.0

    def pad_lanes(self, x: jax.Array) -> jax.Array:
        """Pads heads of any numbers to D."""
        padding = self.row.shape[0] - x.shape[-1]
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])

    def queries(self, x: jax.Array) -> jax.Array:
        """Lays out (B, T, H, D) as [M, X, G, query tiles * block_q, D]."""
        return self.tiling.split_heads(self.pad_lanes(x.astype(self.row.dtype)))

    def keys(self, x: jax.Array) -> jax.Array:
        """Lays out (B, S, K, D) as [M, X, key tiles, block_k, D]."""
        x = self.cut.repeat_heads(x.astype(self.row.dtype))
        return self.tiling.split_keys(self.pad_lanes(x))

    def key_sums(self, x: jax.Array) -> jax.Array:
        """Lays out dk or dv (B, S, K, D) as the backward kernel returns it."""
        x = self.tiling.split_keys(self.pad_lanes(x))
        x = x.reshape(*x.shape[:2], -1, x.shape[-1])  # [M, X, key tiles * block_k, D]
        return self.cut.orientation.swap(x)

    def prepare(
        self, k_start: jax.Array, k_end: jax.Array, owns_keys: bool
    ) -> TpuBounds:
        """Finds what a kernel reads of bounds (M, T), if the chip has room for it.

        owns_keys: whether its programs own key tiles and loop over query tiles.
        """
        tiling = self.tiling
        block_q, block_k = tiling.block_q, tiling.block_k
        k_start = self._pad_rows(k_start)
        k_end = self._pad_rows(k_end)
        if owns_keys:
            ranges = query_ranges(k_start, k_end, block_q, block_k, tiling.keys)
        else:
            ranges = key_ranges(k_start, k_end, block_q, block_k)
        first_ends = self._first_ends(k_start, k_end)
        # Granules of keys outside of [min_k_start, max_k_end) are skipped in a partial
        # tile: no row of the sub-block sees them. [M, query tiles, sub-blocks, rows]
        rows = tiling.bound_rows, tiling.query_tiles, -1, self.cut.blocks.exact_rows
        numbers = TileNumbers(
            ranges=ranges,
            first_ends=first_ends,
            min_k_start=tiling.split_bounds(k_start).reshape(rows).min(axis=-1),
            max_k_end=tiling.split_bounds(k_end).reshape(rows).max(axis=-1),
        )
        # Without a gap for first_ends that are None: `TileNumbers.read` must cut it as
        # it is joined here.
        packed = jnp.concatenate([x.ravel() for x in jax.tree.leaves(numbers)])
        needed = buffer_bytes(packed)
        limit = self._smem_bytes
        if needed > limit:
            raise NotImplementedError(
                f"the bounds of all tiles take {needed / 2**10:.1f} KiB, more than the "
                f"{limit / 2**10:.1f} KiB of scalar memory that a kernel has on TPU "
                f"{self.chip.chip_version}: shard the sequence, or a batch of rows "
                "with bounds of their own, over more devices"
            )
        bounds = jnp.stack([k_start, k_end], 1)  # [M, 2, query tiles * block_q]
        bounds = bounds.reshape(tiling.bound_rows, 2, tiling.query_tiles, block_q)
        # A device has these of the whole row, for all ring steps: P is as short as can
        # be, and the kernels repeat it for the other stacked heads.
        heads = math.lcm(block_q, LANES) // block_q
        return TpuBounds(packed, jnp.tile(bounds.swapaxes(1, 2), heads))

    def _pad_rows(self, bound: jax.Array) -> jax.Array:
        """Repeats the last row's bound after the end: (M, T) -> [M, query tiles' rows].

        Bounds are kept within the keys: the compiled kernels do not check their copies.
        """
        tiling = self.tiling
        padding = tiling.query_tiles * tiling.block_q - bound.shape[1]
        bound = jnp.clip(bound, 0, tiling.keys)  # (M, T)
        return jnp.pad(bound, ((0, 0), (0, padding)), mode="edge")

    def _first_ends(self, k_start: jax.Array, k_end: jax.Array) -> Array | None:
        """Returns `Diagonals.first_ends` of all query tiles, [M, query tiles].

        None where SMEM may not hold them beside the other numbers.
        """
        tiling = self.tiling
        blocks = self.cut.blocks
        # An upper bound: ranges are of query tiles (forward) or key tiles (backward).
        tiles = tiling.bound_rows * max(tiling.query_tiles, tiling.key_tiles)
        numbers = 5 + 2 * blocks.stacked_rows // blocks.exact_rows
        if 4 * numbers * tiles > self._smem_bytes:
            return None
        ranges = key_ranges(k_start, k_end, tiling.block_q, tiling.block_k)
        shape = tiling.bound_rows, tiling.query_tiles, tiling.block_q
        # Also for the backward, which has no code for all of them: `hold` says which.
        diagonals = Diagonals.of(blocks, tiling.block_q, with_staircases=True)
        return diagonals.first_ends(
            ranges, k_start.reshape(shape), k_end.reshape(shape)
        )

    @property
    def _smem_bytes(self) -> int:
        """Bytes of SMEM for numbers of tiles: counts and the compiler take 2 KiB."""
        return self.chip.smem_capacity_bytes - 2**11

    def options(
        self,
        tiles: Literal["parallel", "arbitrary"],
        matmuls: int,
        operands: NamedTuple,
    ) -> dict[str, Any]:
        """Returns the options of a `pl.pallas_call` with a grid of (batch, head, tile).

        tiles: "parallel", or "arbitrary" if those of a head must run in order on one
          core. matmuls: of a tile. operands: each is read once.
        """
        tiling = self.tiling
        # All queries with all keys, the most of any mask. XLA hides a ring's transfers
        # behind a kernel by this estimate.
        scores = tiling.batch * tiling.kv_heads * tiling.group
        scores *= tiling.length * tiling.keys
        return {
            "compiler_params": pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", tiles),
                vmem_limit_bytes=vmem_limit(self.chip),
                # Ten bundles for each copy. `_pad_rows` keeps copies within the keys.
                disable_bounds_checks=True,
                flags={
                    "XLA_TPU_FORCE_LP_LLO_SCHEDULER": self.cut.blocks.has_lp_scheduler
                },
            ),
            "cost_estimate": pl.CostEstimate(
                flops=2 * matmuls * scores * self.depth,
                transcendentals=scores,
                bytes_accessed=buffer_bytes(operands),
            ),
            "interpret": self.interpret,
        }


def row_of(x: jax.Array, chip: pltpu.TpuInfo) -> jax.ShapeDtypeStruct:
    """Returns a row of an operand, [D]: padded to whole lanes, of a matmul's type."""
    is_supported = chip.is_matmul_supported(x.dtype, x.dtype)
    depth = -(-x.shape[-1] // row_lanes(chip)) * row_lanes(chip)
    return jax.ShapeDtypeStruct((depth,), x.dtype if is_supported else jnp.float32)
