"""Adds the gradients of a tile in the TPU backward kernel, by pieces of its rows.

The three stages of a piece wait for each other; those of other pieces, `ahead` pieces
later, are issued between them:

    stage 0   S^T = K Q^T             P^T = exp2(S^T - lse)
    stage 1   dV += P^T dO            dP^T = V dO^T, dS^T = P^T (dP^T - delta), times
                                      the slope of a soft cap, if any
    stage 2   dQ += dS K              dK += dS^T Q

Within a piece each matmul is issued once its operands are there, and dQ before dK:
issued any earlier, more of them wait in registers, and spill.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ...masks import in_interval
from .bounds import Diagonals, SubBlockBounds
from .tile_config import TileConfig
from .vector import NN, NT, TN, Orientation, dot

STAGES = 3


class QueryTileRefs(NamedTuple):
    """A query tile in VMEM."""

    q: jax.Ref  # [R, D]
    do: jax.Ref  # [R, D]
    lse_delta: jax.Ref  # [2, R]
    row_bounds: jax.Ref  # [2, R]: k_start, k_end
    dq: jax.Ref  # [R, D], or swapped: accumulator


class KeyTileRefs(NamedTuple):
    """A key tile in VMEM, or some keys of it."""

    k: jax.Ref  # [keys, D]
    v: jax.Ref  # [keys, D]
    dk: jax.Ref  # [keys, D], or swapped: accumulator, as the next
    dv: jax.Ref

    def at(self, keys: pl.Slice, orientation: Orientation) -> "KeyTileRefs":
        """Returns some keys."""
        return KeyTileRefs(
            k=self.k.at[keys, :],
            v=self.v.at[keys, :],
            dk=orientation.at(self.dk, keys),
            dv=orientation.at(self.dv, keys),
        )


class BackwardTile(NamedTuple):
    """A key tile with a query tile.

    first_key: of the key tile. bounds: of the query tile.
    """

    keys: KeyTileRefs
    queries: QueryTileRefs
    first_key: jax.Array
    bounds: SubBlockBounds
    diagonals: Diagonals
    config: TileConfig

    def add_gradients(self, is_full: jax.Array, first_end: jax.Array) -> None:
        """Adds the gradients of all pairs of the tile that are visible.

        first_end: `Diagonals.first_ends` of the query tile, less `first_key`.
        """
        is_diagonal = self.diagonals.hold(first_end)
        pl.when(is_full)(self._add_full)
        self.diagonals.attend(first_end, self._add_diagonal)
        pl.when(~(is_full | is_diagonal))(self._add_partial)

    def _add_full(self) -> None:
        size = self.config.blocks.rows
        starts = range(0, self.queries.q.shape[0], size)
        pieces = [self._piece(self.keys, pl.ds(r, size)) for r in starts]
        _interleave(pieces, self.config.blocks.ahead)

    def _add_diagonal(self, base: int, end: jax.Array) -> None:
        """Adds those of a diagonal tile; base, end: see `Diagonals`."""
        blocks = self.config.blocks
        pieces = []
        # The shortest first: the first matmul of all is soon done.
        for strip in self.diagonals.strips(blocks, base)[::-1]:
            # All keys that the strip sees lie at the tile's begin, the masked ones too.
            live = pl.ds(0, len(strip.columns) * strip.width)
            keys = self.keys.at(live, self.config.orientation)
            first = strip.rows.start
            mask = functools.partial(
                self.diagonals.mask, end=end, first=first, axis=1, masked=0.0
            )
            pieces.append(self._piece(keys, strip.rows, mask))
        _interleave(pieces, blocks.diagonal_ahead)

    def _add_partial(self) -> None:
        """Adds those of the live granules of each sub-block, masked."""
        self.bounds.for_each(self.config.blocks, self.first_key, self._sub_block)

    def _sub_block(self, rows: pl.Slice, begin: jax.Array) -> Callable[[int], None]:
        """Returns what adds those of keys [begin, begin + width), called with width."""
        mask = functools.partial(self._mask, rows=rows, begin=begin)

        def add(width: int) -> None:
            keys = self.keys.at(pl.ds(begin, width), self.config.orientation)
            _interleave([self._piece(keys, rows, mask)], ahead=0)

        return add

    def _mask(self, p: jax.Array, *, rows: pl.Slice, begin: jax.Array) -> jax.Array:
        """Sets P^T [keys, rows] of the tile's keys from `begin` on to 0 if masked."""
        k_start = self.queries.row_bounds[pl.ds(0, 1), rows]  # [1, rows]
        k_end = self.queries.row_bounds[pl.ds(1, 1), rows]  # [1, rows]
        key = lax.broadcasted_iota(jnp.int32, p.shape, 0)  # [keys, rows]
        key = self.first_key + begin + key  # [keys, rows]
        return jnp.where(in_interval(k_start, key, k_end), p, 0.0)

    def _piece(
        self,
        keys: KeyTileRefs,
        rows: pl.Slice,
        mask: Callable[[jax.Array], jax.Array] | None = None,
    ) -> Iterator[None]:
        """Adds the gradients of some rows and keys, stage by stage.

        mask: of P^T, if there is one.
        """
        config, queries = self.config, self.queries
        matmul = functools.partial(dot, precision=config.precision)
        q = queries.q[rows, :]  # [rows, D]
        do = queries.do[rows, :]  # [rows, D]
        lse = queries.lse_delta[pl.ds(0, 1), rows]  # [1, rows]
        delta = queries.lse_delta[pl.ds(1, 1), rows]  # [1, rows]
        s, slope = config.scores_and_slope(keys.k[...], q)  # S^T [keys, rows]
        p = jnp.exp2(s - lse)  # P^T [keys, rows]
        if mask:
            # After exp2: masked scores may overflow to inf, which 0 takes the place of.
            p = mask(p)  # [keys, rows]
        yield
        keys.dv[...] += config.product(p.astype(q.dtype), do, NN)  # as dv, and so on
        dp = matmul(keys.v[...], do, NT)  # dP^T [keys, rows]
        if slope is not None:
            p *= slope  # [keys, rows]
        ds = (p * (dp - delta)).astype(q.dtype)  # dS^T [keys, rows]
        yield
        dq_ref = config.orientation.at(queries.dq, rows)
        dq_ref[...] += config.product(ds, keys.k[...], TN)
        keys.dk[...] += config.product(ds, q, NN)
        yield


def _interleave(pieces: list[Iterator[None]], ahead: int) -> None:
    """Issues the stages of all pieces, each `ahead` pieces before the one after it."""
    for n in range(len(pieces) + ahead * (STAGES - 1)):
        for stage in range(STAGES):
            piece = n - stage * ahead
            if 0 <= piece < len(pieces):
                next(pieces[piece])
