"""Launches the Hopper (H100, H200) kernels as steps of a ring: see `backends.steps`.

Pads queries to whole tiles and counts in XLA which tiles are live for `backward` (see
`tile_ranges`), once a ring, and runs the kernels of `forward`, `backward` and
`backward_dq`.

An exponent is one fused multiply-add of a score, the scale and the maximum, so it is
off by the rounding of the latter: by 1 for scores of 1e7, and those of 1e9 overflow.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ...devices.device import device_kind, is_hopper
from ...masks import Visible
from ...merge import Partial, added
from ...precision import LOG2_E, Scores, exponent_factors, forward_factors
from ..steps import Kernels, Rows
from ..tile_ranges import TileRanges, query_ranges
from . import backward as backward_kernel
from . import backward_dq as dq_kernel
from . import forward as forward_kernel
from .backward_tile import MAX_COLUMNS, KeyConfig, KeyOperands
from .emulation import EmulatedOps
from .query_tile import QueryConfig, QueryOperands
from .shared import BLOCK_Q, ROWS, NativeOps

TYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
"""Types of operands that the kernels multiply."""

BLOCK_K = 128
"""Multiple of the keys of each backward tile, as BLOCK_Q is of its queries."""

Blocks = tuple[int, int, int]

# The largest tiles without spills, by head size; others are padded to the next.
FORWARD: dict[int, Blocks] = {64: (128, 4, 4), 128: (128, 2, 2), 256: (64, 2, 2)}
"""Keys of a tile, and stages of K and V; 2 at least, as V(n) comes in beside V(n-1)."""

BACKWARD_DQ: dict[int, Blocks] = {64: (128, 4, 4), 128: (128, 2, 2), 256: (64, 2, 1)}
"""The same of `backward_dq`."""

BACKWARD = {64: 128, 128: 64, 256: 64}
"""Queries of a tile of `backward`."""


QueryBounds = tuple[jax.Array, jax.Array]
"""k_start and k_end of `QueryOperands`."""

KeyBounds = tuple[jax.Array, jax.Array, jax.Array]
"""live, full and bounds of `KeyOperands`."""


def _of_key_tiles(
    k_start: jax.Array, k_end: jax.Array, config: KeyConfig, keys: int
) -> KeyBounds:
    """Finds the live query tiles of key tiles. k_start, k_end: (M, L)."""
    block_q = config.block_q
    k_start = _padded_bound(k_start)  # (M, T)
    k_end = _padded_bound(k_end)  # (M, T)
    live = query_ranges(k_start, k_end, block_q, config.block_k, keys)
    full = query_ranges(k_start, k_end, block_q, ROWS, keys)
    return _live_pairs(live), _full_pairs(full), _stacked(k_start, k_end, block_q)


@dataclass(frozen=True)
class HopperForwardSteps:
    """Forward steps of queries: see `backends.steps`.

    shape: (B, L, H, D). q: the same in whole tiles, (B, T, H, d). out_type: of out.
    """

    config: QueryConfig
    interpret: plgpu.InterpretGPUParams | None
    shape: tuple[int, ...]
    q: jax.Array
    out_type: Any = jnp.float32

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> QueryBounds:
        """Pads bounds to whole tiles, of which the kernel finds the live ones."""
        return _padded_bound(k_start), _padded_bound(k_end)

    def begin(self, partial: Partial) -> Partial:
        """Pads a partial result to whole tiles."""
        out, lse = partial
        return _padded(out, BLOCK_Q, self.q.shape[-1]), _padded_rows(lse)

    def attend(
        self, k: jax.Array, v: jax.Array, prepared: QueryBounds, carry: Partial | None
    ) -> Partial:
        """Runs the kernel, in the place of a carry: see `HopperBackwardSteps.add`."""
        block_k = self.config.block_k
        d = self.q.shape[-1]
        # No bound reaches the zeros after the last key: a tile with some is not full,
        # and has a mask.
        k = _padded(k, block_k, d)  # (B, S, K, d)
        v = _padded(v, block_k, d)  # (B, S, K, d)
        k_start, k_end = prepared
        operands = QueryOperands(k_start, k_end, (), self.q, (), k, v, carry or ())
        if carry:
            operands = lax.optimization_barrier(operands)
        result = forward_kernel.forward_call(
            self.config, operands, self.out_type, self.interpret
        )
        return lax.optimization_barrier(result) if carry else result

    def finish(self, carry: Partial) -> Partial:
        """Returns out (B, L, H, D) and lse (B, H, L)."""
        out, lse = carry
        _, length, _, depth = self.shape
        return out[:, :length, :, :depth], lse[..., :length]


@dataclass(frozen=True)
class HopperBackwardSteps:
    """Backward steps of queries: see `backends.steps`.

    One kernel computes all gradients, in five products a tile. Or one computes dk and
    dv, and another dq: see `Launch`. These take seven products, and nine for heads of
    more than 128 numbers: two consumers then need the same P, for half of dk and dv.

    key_config: of the kernel of dk and dv. query_config: of that of dq, if it has its
      own.
    shape: of q, (B, L, H, D). keys: of a shard, in whole tiles.
    q, do: (B, T, H, d). rows: lse, for exponents of 2, and delta, (B, H, T).
    lse_delta: the same for the kernel of dk and dv, (B, H, T / block_q, 2, block_q).
    dk_scale: see `KeyConfig`; of dq too, if it has a kernel of its own.
    """

    key_config: KeyConfig
    query_config: QueryConfig | None
    interpret: plgpu.InterpretGPUParams | None
    shape: tuple[int, ...]
    keys: int
    q: jax.Array
    do: jax.Array
    rows: tuple[jax.Array, jax.Array]
    lse_delta: jax.Array
    dk_scale: float | None = None

    def prepare(
        self, k_start: jax.Array, k_end: jax.Array
    ) -> tuple[KeyBounds, QueryBounds | None]:
        """Finds the live tiles of key tiles, and pads bounds for another kernel."""
        of_keys = _of_key_tiles(k_start, k_end, self.key_config, self.keys)
        if self.query_config is None:
            return of_keys, None
        return of_keys, (_padded_bound(k_start), _padded_bound(k_end))

    def begin(self, dq: jax.Array) -> jax.Array:
        """Pads dq to whole tiles."""
        return _padded(dq, BLOCK_Q, self.q.shape[-1])

    def finish(self, dq: jax.Array) -> jax.Array:
        """Returns dq (B, L, H, D)."""
        return dq[:, : self.shape[1], :, : self.shape[-1]]

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: tuple[KeyBounds, QueryBounds | None],
        dq: jax.Array,
        dkv: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the kernels.

        They add to dq in place. Where XLA fuses a kernel with slices that it reads or
        updates, the alias is lost, and dq with it; it fuses nothing across a barrier.
        """
        keys = k.shape[1]
        depth = self.shape[-1]
        d = self.q.shape[-1]
        k = _padded(k, self.keys, d)  # (B, S, K, d)
        v = _padded(v, self.keys, d)  # (B, S, K, d)
        (live, full, bounds), of_queries = prepared
        dkv_operands = KeyOperands(
            live, full, k, v, self.q, self.do, self.lse_delta, bounds
        )
        dq_operands = of_queries and QueryOperands(
            *of_queries, self.rows, self.q, self.do, k, v, ()
        )
        dkv_operands, dq_operands, dq = lax.optimization_barrier(
            (dkv_operands, dq_operands, dq)
        )
        key_config = self.key_config._replace(dk_scale=self.dk_scale)
        added_dq, dk, dv = backward_kernel.backward_call(
            key_config, dkv_operands, None if dq_operands else dq, self.interpret
        )
        if self.query_config and dq_operands:
            query_config = self.query_config._replace(dq_scale=self.dk_scale)
            added_dq = dq_kernel.query_gradients_call(
                query_config, dq_operands, dq, self.interpret
            )
        dq, dk, dv = lax.optimization_barrier((added_dq, dk, dv))
        dk = dk[:, :keys, :, :depth]  # (B, S, K, D)
        dv = dv[:, :keys, :, :depth]  # (B, S, K, D)
        return dq, *added(dkv, (dk, dv))


@dataclass(frozen=True)
class Launch(Kernels):
    """The backend, with the options of its kernels.

    blocks: as in `FORWARD`; the best for the head size unless given.
    interpret: how Pallas interprets the kernels on a CPU, for tests; None compiles.
    is_deterministic: whether `backward` sums dq in the same order each time, as it does
      for heads of more than 128 numbers in any case. It takes two WGMMAs more a tile.
    """

    blocks: Blocks | None = None
    interpret: plgpu.InterpretGPUParams | None = None
    is_deterministic: bool = False

    @property
    def ops(self) -> NativeOps:
        return NativeOps() if self.interpret is None else EmulatedOps()

    def forward_steps(
        self, q: jax.Array, k: jax.Array, visible: Visible, scores: Scores
    ) -> HopperForwardSteps:
        """Pads queries, (B, L, H, D).

        Raises:
          ValueError: a type that the kernels do not multiply.
          NotImplementedError: a head that is too large, or there is no Hopper GPU to
            compile for.
        """
        del k, visible
        d = _checked_head_size(q, self.interpret)
        shape = q.shape
        q, scale, tanh_scale = forward_factors(q, scores)
        blocks = self.blocks or FORWARD[d]
        config = QueryConfig(*blocks, scale, tanh_scale, self.ops)
        q = _padded(q, BLOCK_Q, d)  # (B, T, H, d)
        return HopperForwardSteps(config, self.interpret, shape, q)

    def backward_steps(
        self, rows: Rows, k: jax.Array, visible: Visible, scores: Scores
    ) -> HopperBackwardSteps:
        """Pads q, do, lse and delta; errors as of `forward_steps`."""
        del visible
        q, do, lse, delta = rows
        d = _checked_head_size(q, self.interpret)
        scale, tanh_scale = exponent_factors(scores)
        query_config = None
        if d > MAX_COLUMNS or self.is_deterministic:
            blocks = BACKWARD_DQ[d]
            query_config = QueryConfig(*blocks, scale, tanh_scale, self.ops)
        key_config = KeyConfig(d, BACKWARD[d], scale, tanh_scale, self.ops)
        keys = -(-k.shape[1] // BLOCK_K) * BLOCK_K
        if scores.soft_cap is not None and keys == BLOCK_K:
            keys += BLOCK_K  # with one key tile, ptxas spills 8 bytes of capped scores
        # Without the barrier XLA makes one fusion of delta's sum and what stacks it, in
        # which a thread adds up a row. P of rows after the end is 0.
        delta = _padded_rows(lax.optimization_barrier(delta))
        # Exponents of 2 in the kernels: P = exp2(s · scale - lse).
        if scores.soft_cap is None:
            lse = lse * LOG2_E
        else:  # of 1 + tanh; of rows without a key P is 0 where all scores are finite
            is_empty = lse == -jnp.inf
            lse = jnp.where(is_empty, jnp.inf, (lse + scores.soft_cap) * LOG2_E)
        lse = _padded_rows(lse, jnp.inf)
        return HopperBackwardSteps(
            key_config=key_config,
            query_config=query_config,
            interpret=self.interpret,
            shape=q.shape,
            keys=keys,
            q=_padded(q, BLOCK_Q, d),
            do=_padded(do, BLOCK_Q, d),
            rows=(lse, delta),
            lse_delta=_stacked(lse, delta, key_config.block_q),
        )


def _live_pairs(ranges: TileRanges) -> jax.Array:
    """Stacks begin and end of the live tiles of each line, (M, tiles, 2)."""
    return jnp.stack((ranges.live_begin, ranges.live_end), axis=-1)


def _full_pairs(ranges: TileRanges) -> jax.Array:
    """Stacks begin and end of the full tiles of each line, (M, tiles, 2)."""
    return jnp.stack((ranges.full_begin, ranges.full_end), axis=-1)


def _checked_head_size(q: jax.Array, interpret: plgpu.InterpretGPUParams | None) -> int:
    """Returns the head size, at least that of q, that there are kernels for."""
    if interpret is None and not is_hopper(device_kind()):
        raise NotImplementedError(
            "hopper needs an H100 or H200 GPU, or a mesh that describes one, got "
            f"{device_kind()!r}: name another implementation, or none"
        )
    if q.dtype not in TYPES:
        raise ValueError(
            f"for hopper, q.dtype must be bfloat16 or float16, got {q.dtype}: cast q, "
            "k and v, or name another implementation"
        )
    sizes = [size for size in FORWARD if size >= q.shape[-1]]
    if not sizes:
        raise NotImplementedError(
            f"hopper has kernels for heads of up to {max(FORWARD)} numbers, got "
            f"{q.shape=}: name another implementation"
        )
    return min(sizes)


def _padded(x: jax.Array, rows: int, d: int) -> jax.Array:
    """Pads (B, T, H, D), with zeros, to a multiple of `rows` and to d numbers."""
    new_rows = -x.shape[1] % rows
    new_numbers = d - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, new_rows), (0, 0), (0, new_numbers)))


def _padded_rows(x: jax.Array, value: float = 0.0) -> jax.Array:
    """Pads (B, H, L) to whole query tiles."""
    new_rows = -x.shape[-1] % BLOCK_Q
    return jnp.pad(x, ((0, 0), (0, 0), (0, new_rows)), constant_values=value)


def _padded_bound(bound: jax.Array) -> jax.Array:
    """Pads (M, L) to whole query tiles, with the last: bounds must not decrease."""
    new_rows = -bound.shape[1] % BLOCK_Q
    return jnp.pad(bound, ((0, 0), (0, new_rows)), mode="edge")


def _stacked(first: jax.Array, second: jax.Array, block_q: int) -> jax.Array:
    """Stacks two [..., T] as [..., T / block_q, 2, block_q]."""
    tiles = [x.reshape(*x.shape[:-1], -1, block_q) for x in (first, second)]
    return jnp.stack(tiles, axis=-2)
