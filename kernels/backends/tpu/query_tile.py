"""A query tile of the TPU forward kernel: its softmax, key tile by key tile.

Full tiles and a causal diagonal are attended to lazily, as straight-line code; other
partial tiles, and those whose sums grow too large, exactly, sub-block by sub-block.

Lazy tiles come one after the other, full ones from the last to the first, behind the
diagonal if there is one. Each reads the version of l and acc that the one before wrote,
so a tile's number alone says which version that is: see `_version_before`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...masks import Array
from ..tile_ranges import TileRanges
from .bounds import Diagonals, RowBounds, Strip, SubBlockBounds, for_each_sub_block
from .dma import stacked_rows
from .softmax import (
    NOTHING,
    SUM_LIMIT,
    Carry,
    InitialState,
    LazyPlan,
    LazyTile,
    SoftmaxState,
    exact_tile,
)
from .tile_config import TileConfig
from .vector import LANES, reciprocal, strips

IS_EXACT, VISITED = 0, 1
"""Indices in SMEM: whether a tile must be computed again, exactly; and the key tiles of
the chain of programs so far."""


class ForwardQueryTile(NamedTuple):
    """A query tile in VMEM, and its softmax so far."""

    config: TileConfig
    ranges: TileRanges  # of this query tile
    diagonals: Diagonals
    first_end: jax.Array  # of `first_ends`, less the first key after the full tiles
    q: jax.Ref  # [R, D]
    carry: Carry | tuple[()]
    state: SoftmaxState
    counts: jax.Ref  # [2], SMEM: at IS_EXACT and VISITED
    bounds_ref: jax.Ref  # [2, P]
    bounds: RowBounds  # filled where there are partial tiles
    sub_blocks: SubBlockBounds

    def begin(self) -> None:
        """Sets what the first tile reads; a diagonal one reads the carry itself."""
        # Scratch is not cleared: nobody else sets it before the first tile reads it.
        self.counts[IS_EXACT] = 0
        pl.when(~self._has_diagonal)(lambda: self._set_initial(0))
        full_begin = self.ranges.full_begin
        full_end = self._lazy_end
        has_partial = (self.ranges.live_begin < full_begin) | (
            full_end < self.ranges.live_end
        )
        pl.when(has_partial)(self._load_bounds)

    def attend(self, j: jax.Array, k_ref: jax.Ref, v_ref: jax.Ref) -> None:
        """Adds key tile j to the softmax. k_ref, v_ref: [block_k, D]."""
        ranges = self.ranges
        kv_refs = k_ref, v_ref
        src = self._version_before(j)
        is_full = (ranges.full_begin <= j) & (j < ranges.full_end)
        is_diagonal = self._has_diagonal & (j == ranges.full_end)
        is_lazy = is_full | is_diagonal
        pl.when(is_full)(lambda: self._attend_full(j, src, kv_refs))
        attend = functools.partial(self._attend_diagonal, src, kv_refs)
        pl.when(is_diagonal)(lambda: self.diagonals.attend(self.first_end, attend))

        # Behind the lazy tile's code, which sets IS_EXACT if its sums grew too large.
        @pl.when(~is_lazy | (self.counts[IS_EXACT] != 0))
        def _():
            # Here, as a copy of this code for each kind of lazy tile is long. Bounds
            # are loaded only by `begin` and here, where the exact path reads them.
            pl.when(is_lazy)(self._load_bounds)
            self.counts[IS_EXACT] = 0
            # Partial tiles write the version that they read.
            dst = jnp.where(is_lazy, 1 - src, src)
            self._attend_exactly(j, dst, kv_refs)

    def finish(self, out_ref: jax.Ref, lse_ref: jax.Ref) -> None:
        """Writes out = acc / l and lse = m + log2(l)."""
        orientation = self.config.orientation
        # Partial tiles behind the last lazy one keep its version.
        src = self._version_before(self.ranges.full_begin - 1)
        # Stacked heads leave by way of acc: out has their rows apart, head by head.
        is_stacked = out_ref.shape[0] > 1
        normalised_ref = self.state.acc.at[src] if is_stacked else out_ref.at[0]
        for strip, rows in strips(self.q.shape[0]):
            state = self.state.at(src, rows, orientation)
            # Sums are kept lane by lane, and added up only here.
            l = state.l[...].sum(axis=orientation.keys_axis, keepdims=True)
            has_keys = l != 0  # also where it is nan, which must show
            l = jnp.where(has_keys, l, 1.0)
            l = jnp.broadcast_to(l, state.m.shape)  # numbers of rows
            inverse = orientation.widen(
                reciprocal(l), state.acc.shape[orientation.keys_axis]
            )  # meets acc
            normalised = (state.acc[...] * inverse).astype(normalised_ref.dtype)
            orientation.at(normalised_ref, rows)[...] = normalised  # as acc
            lse = jnp.where(has_keys, state.m[...] + jnp.log2(l), NOTHING)
            lse_ref[orientation.strip(strip)] = orientation.pack(lse)  # [1, 128]
        if is_stacked:
            heads = stacked_rows(out_ref.shape[0], self.q.shape[0])
            for head, rows in enumerate(heads):
                normalised = orientation.at(normalised_ref, rows)[...]
                out_ref[head] = normalised.astype(out_ref.dtype)  # [block_q, D]

    @property
    def _has_diagonal(self) -> jax.Array:
        return self.diagonals.hold(self.first_end)

    @property
    def _lazy_end(self) -> Array:
        """End of the tiles that are attended to lazily: full ones, then a diagonal."""
        return self.ranges.full_end + self._has_diagonal.astype(jnp.int32)

    def _version_before(self, j: Array) -> Array:
        """Returns the version of l and acc, 0 or 1, that key tile j reads.

        It is the number of lazy tiles before j, modulo 2: each writes the version that
        it does not read. Tiles come from the last to the first.
        """
        begin = self.ranges.full_begin
        end = self._lazy_end
        return jnp.clip(end - 1 - j, 0, end - begin) & 1

    def _set_initial(self, version: int | jax.Array) -> None:
        """Sets m, and l and acc of a version, to those of the carry, or of no keys."""
        state = self.state
        if not self.carry:
            # l of 0 marks rows without a key, for `finish`; scratch is not cleared.
            state.m[...] = jnp.full_like(state.m, NOTHING)
            state.l[version] = jnp.zeros(state.l.shape[1:], jnp.float32)
            state.acc[version] = jnp.zeros(state.acc.shape[1:], jnp.float32)
            return
        self._set_max_of_carry()
        initial = self._initial_state()
        for _, rows in strips(self.q.shape[0]):
            initial.store(rows, state.at(version, rows, self.config.orientation))

    def _set_max_of_carry(self) -> None:
        """Sets m to lse of the carry."""
        orientation = self.config.orientation
        for strip, rows in strips(self.q.shape[0]):
            lse = orientation.unpack(self.carry.lse[orientation.strip(strip)])
            orientation.at(self.state.m, rows)[...] = lse

    def _initial_state(self) -> InitialState:
        """Returns what precedes all key tiles; m must be set to lse of a carry."""
        orientation = self.config.orientation
        if not self.carry:
            return InitialState.empty(self.state, orientation)
        block_q = self.diagonals.block_q
        return InitialState.from_carry(self.carry, self.state.m, block_q, orientation)

    def _load_bounds(self) -> None:
        self.bounds.load(self.bounds_ref, self.config.orientation)

    def _attend_full(
        self, j: jax.Array, src: jax.Array, kv_refs: tuple[jax.Ref, jax.Ref]
    ) -> None:
        k_ref, v_ref = kv_refs
        if not self.carry:  # with one, nearly all rows have an m already
            is_first = j == self.ranges.live_end - 1
            pl.when(is_first)(lambda: self._look_for_max(src, k_ref))
        blocks = self.config.blocks
        columns = tuple(range(0, k_ref.shape[0], blocks.columns))
        rows = range(0, self.q.shape[0], blocks.rows)
        every = [Strip(pl.ds(r, blocks.rows), columns, blocks.columns) for r in rows]
        plan = LazyPlan(every, blocks.ahead, blocks.behind)
        tile = LazyTile(self.q, k_ref, v_ref, self.state, src, plan, self.config)

        # The exact path updates version 1 - src in place, from the state before.
        def restore() -> None:
            self.state.l[1 - src] = self.state.l[src]
            self.state.acc[1 - src] = self.state.acc[src]

        self._check(tile.attend(), restore)

    def _attend_diagonal(
        self,
        src: jax.Array,
        kv_refs: tuple[jax.Ref, jax.Ref],
        base: int,
        end: jax.Array,
    ) -> None:
        """Attends to a diagonal tile, the first one. base, end: see `Diagonals`."""
        blocks = self.config.blocks
        axis = self.config.orientation.axis

        def mask(s: jax.Array, rows: pl.Slice, first_key: int) -> jax.Array:
            end_here = end - first_key
            return self.diagonals.mask(s, end_here, rows.start, axis, -jnp.inf)

        if self.carry:
            self._set_max_of_carry()
        plan = LazyPlan(
            strips=self.diagonals.strips(blocks, base),
            ahead=blocks.diagonal_ahead,
            behind=blocks.diagonal_behind,
            mask=mask,
            # `begin` has written no version: the carry is read where it lies.
            initial=self._initial_state(),
        )
        k_ref, v_ref = kv_refs
        tile = LazyTile(self.q, k_ref, v_ref, self.state, src, plan, self.config)
        self._check(tile.attend(), lambda: self._set_initial(1 - src))

    def _check(self, max_l: jax.Array, restore: Callable[[], None]) -> None:
        """Prepares for exact computation where sums are too large."""

        @pl.when(max_l > SUM_LIMIT)
        def _():
            self.counts[IS_EXACT] = 1
            restore()

    def _look_for_max(self, src: jax.Array, k_ref: jax.Ref) -> None:
        """Sets m to the maxima over the first 128 keys of a tile."""

        orientation = self.config.orientation

        def step(_: jax.Array, rows: pl.Slice) -> None:
            q = self.q[rows, :]  # [exact_rows, D]
            # A few keys will do: m need not be the maximum, only near enough to it.
            k = k_ref[pl.ds(0, LANES), :]  # [128, D]
            s = self.config.scores(q, k)  # [exact_rows, 128], or swapped
            self.state.at(src, rows, orientation).update_max([s], orientation)

        for_each_sub_block(self.config.blocks, step)

    def _attend_exactly(
        self, j: jax.Array, version: jax.Array, kv_refs: tuple[jax.Ref, jax.Ref]
    ) -> None:
        """Attends to the visible keys of a tile, in place."""
        tile_key = j * kv_refs[0].shape[0]
        attend = functools.partial(
            self._exact_sub_block, version=version, kv_refs=kv_refs, tile_key=tile_key
        )
        self.sub_blocks.for_each(self.config.blocks, tile_key, attend)

    def _exact_sub_block(
        self,
        rows: pl.Slice,
        begin: jax.Array,
        *,
        version: jax.Array,
        kv_refs: tuple[jax.Ref, jax.Ref],
        tile_key: jax.Array,
    ) -> Callable[[int], None]:
        """Returns what attends to keys [begin, begin + width), called with width."""
        k_ref, v_ref = kv_refs
        orientation = self.config.orientation
        mask = functools.partial(
            self.bounds.mask,
            rows=rows,
            first_key=tile_key + begin,
            orientation=orientation,
        )

        def attend(width: int) -> None:
            keys = pl.ds(begin, width)
            state = self.state.at(version, rows, orientation)
            q = self.q[rows, :]  # [exact_rows, D]
            k = k_ref.at[keys, :]  # [width, D]
            v = v_ref.at[keys, :]  # [width, D]
            exact_tile(q, k, v, state, mask, self.config)

        return attend


def stack_heads(x_ref: jax.Ref, buffer_ref: jax.Ref | tuple[()]) -> jax.Ref:
    """Returns [G, block_q, D] as [R, D]: itself where G is 1, else in the buffer."""
    if isinstance(buffer_ref, tuple):  # nothing is stacked
        return x_ref.at[0]
    for head, rows in enumerate(stacked_rows(x_ref.shape[0], buffer_ref.shape[0])):
        buffer_ref[rows, :] = x_ref[head]  # [block_q, D]
    return buffer_ref
