"""A query tile of the TPU forward kernel: its softmax, key tile by key tile.

Full tiles and a causal diagonal are attended to lazily, as straight-line code; other
partial tiles, and those whose sums grow too large, exactly, sub-block by sub-block.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..tile_ranges import TileRanges
from .bounds import Diagonals, RowBounds, Strip, SubBlockBounds, for_each_sub_block
from .dma import stacked_rows
from .softmax import (
    NOTHING,
    SUM_LIMIT,
    Course,
    SoftmaxState,
    Start,
    exact_tile,
    lazy_tile,
)
from .tile_config import TileConfig
from .vector import LANES, reciprocal, strips

IS_EXACT, VISITED = 0, 1
"""Places in SMEM: whether a tile must be computed again, exactly; and the key tiles of
the chain of programs so far."""


class Carry(NamedTuple):
    """A partial result over other keys: rows that have attended to none have NOTHING.

    out: float32 accumulators: as `Operands.q`, or its last two axes swapped.
    lse: [M, X, query tiles, ...], base 2, `Orientation.packed`.
    """

    out: jax.Array
    lse: jax.Array


class QueryTile(NamedTuple):
    """A query tile in VMEM, and its softmax so far."""

    config: TileConfig
    ranges: TileRanges  # of this query tile
    diagonals: Diagonals
    first_end: jax.Array  # of `first_ends`, less the first key after the full tiles
    q: jax.Ref  # [R, D]
    carry: Carry | tuple[()]
    state: SoftmaxState
    counts: jax.Ref  # [2], SMEM: at IS_EXACT and VISITED
    packed_bounds: jax.Ref  # [2, ...]
    bounds: RowBounds  # filled where there are partial tiles
    sub_blocks: SubBlockBounds

    def begin(self) -> None:
        """Sets what the first tile reads; a diagonal one reads the carry itself."""
        self.counts[IS_EXACT] = 0
        pl.when(~self._has_diagonal)(lambda: self._init(0))
        full_begin, full_end = self.ranges.full_begin, self._lazy_end
        has_partial = (self.ranges.live_begin < full_begin) | (
            full_end < self.ranges.live_end
        )
        pl.when(has_partial)(self._load_bounds)

    def attend(self, j: jax.Array, k_ref: jax.Ref, v_ref: jax.Ref) -> None:
        """Adds key tile j to the softmax. k_ref, v_ref: [block_k, D]."""
        ranges, kv_refs = self.ranges, (k_ref, v_ref)
        src = self._version(j)
        is_full = (ranges.full_begin <= j) & (j < ranges.full_end)
        is_diagonal = self._has_diagonal & (j == ranges.full_end)
        is_lazy = is_full | is_diagonal
        pl.when(is_full)(lambda: self._attend_full(j, src, kv_refs))
        attend = functools.partial(self._attend_diagonal, src, kv_refs)
        pl.when(is_diagonal)(lambda: self.diagonals.attend(self.first_end, attend))

        @pl.when(~is_lazy | (self.counts[IS_EXACT] != 0))
        def _():
            # Here, as a copy of this code for each kind of lazy tile is long.
            pl.when(is_lazy)(self._load_bounds)
            self.counts[IS_EXACT] = 0
            # Partial tiles write the version that they read.
            dst = jnp.where(is_lazy, 1 - src, src)
            self._attend_exactly(j, dst, kv_refs)

    def finish(self, out_ref: jax.Ref, lse_ref: jax.Ref) -> None:
        """Writes out = acc / l and lse = m + log2(l)."""
        orientation = self.config.orientation
        src = self._version(self.ranges.full_begin - 1)
        is_stacked = out_ref.shape[0] > 1
        normalised_ref = self.state.acc.at[src] if is_stacked else out_ref.at[0]
        for strip, rows in strips(self.q.shape[0]):
            state = self.state.at(src, rows, orientation)
            l = state.l[...].sum(axis=orientation.keys_axis, keepdims=True)
            has_keys = l != 0  # also where it is nan, which must show
            l = jnp.where(has_keys, l, 1.0)
            l = jnp.broadcast_to(l, state.m.shape)  # numbers of rows
            inverse = orientation.widen(
                reciprocal(l), state.acc.shape[orientation.keys_axis]
            )
            orientation.at(normalised_ref, rows)[...] = state.acc[...] * inverse
            lse = jnp.where(has_keys, state.m[...] + jnp.log2(l), NOTHING)
            lse_ref[orientation.strip(strip)] = orientation.pack(lse)  # [1, 128]
        if is_stacked:
            heads = stacked_rows(out_ref.shape[0], self.q.shape[0])
            for head, rows in enumerate(heads):
                out_ref[head] = orientation.at(normalised_ref, rows)[...]

    @property
    def _has_diagonal(self) -> jax.Array:
        return self.diagonals.hold(self.first_end)

    @property
    def _lazy_end(self) -> jax.Array:
        """End of the tiles that are attended to lazily: full ones, then a diagonal."""
        return self.ranges.full_end + self._has_diagonal.astype(jnp.int32)

    def _version(self, j: jax.Array) -> jax.Array:
        """Returns the version of l, acc that key tile j reads; lazy tiles flip it."""
        begin, end = self.ranges.full_begin, self._lazy_end
        return jnp.clip(end - 1 - j, 0, end - begin) & 1

    def _init(self, version: int | jax.Array) -> None:
        """Sets m, l and acc: to nothing, or to a carry, as of one key with P = 1."""
        state = self.state
        if not self.carry:
            state.m[...] = jnp.full_like(state.m, NOTHING)
            state.l[version] = jnp.zeros(state.l.shape[1:], jnp.float32)
            state.acc[version] = jnp.zeros(state.acc.shape[1:], jnp.float32)
            return
        self._init_max()
        carried = self._carried()
        for _, rows in strips(self.q.shape[0]):
            some = state.at(version, rows, self.config.orientation)
            some.l[...], some.acc[...] = carried.l(rows), carried.acc(rows)

    def _init_max(self) -> None:
        """Sets m to that of the carry."""
        orientation = self.config.orientation
        for strip, rows in strips(self.q.shape[0]):
            m = orientation.unpack(self.carry.lse[orientation.strip(strip)])
            orientation.at(self.state.m, rows)[...] = m

    def _carried(self) -> Start:
        """Returns l and acc of the carry, as of one key with P = 1; m must be set."""
        orientation, block_q = self.config.orientation, self.diagonals.block_q

        def sums(rows: pl.Slice) -> jax.Array:
            m = orientation.at(self.state.m, rows)[...]
            one = jnp.where(m > NOTHING, 1 / orientation.sum_width, 0.0)
            shape = orientation.ordered(rows.size, orientation.sum_width)
            return jnp.broadcast_to(one, shape)  # adds up to 1

        def acc(rows: pl.Slice) -> jax.Array:
            size = min(block_q, rows.size)
            heads = [
                orientation.at(
                    self.carry.out.at[first // block_q], pl.ds(first % block_q, size)
                )[...]
                for first in range(rows.start, rows.start + rows.size, size)
            ]
            return jnp.concatenate(heads, orientation.axis)  # [rows, D], or swapped

        return Start(sums, acc, has_max=True)

    def _nothing(self) -> Start:
        """Returns l and acc before any keys; m is not set."""
        orientation = self.config.orientation

        def zeros(x_ref: jax.Ref) -> Callable[[pl.Slice], jax.Array]:
            return lambda rows: jnp.zeros_like(orientation.at(x_ref.at[0], rows))

        return Start(zeros(self.state.l), zeros(self.state.acc), has_max=False)

    def _load_bounds(self) -> None:
        self.bounds.load(self.packed_bounds, self.config.orientation)

    def _attend_full(
        self, j: jax.Array, src: jax.Array, kv_refs: tuple[jax.Ref, jax.Ref]
    ) -> None:
        if not self.carry:  # with one, nearly all rows have an m already
            is_first = j == self.ranges.live_end - 1
            pl.when(is_first)(lambda: self._look_for_max(src, kv_refs[0]))
        blocks = self.config.blocks
        columns = tuple(range(0, kv_refs[0].shape[0], blocks.columns))
        every = [
            Strip(pl.ds(r, blocks.rows), columns, blocks.columns)
            for r in range(0, self.q.shape[0], blocks.rows)
        ]
        course = Course(every, (blocks.ahead, blocks.behind))
        max_l = lazy_tile(self.q, kv_refs, self.state, src, course, self.config)

        def restore() -> None:
            for x in self.state.l, self.state.acc:
                x[1 - src] = x[src]

        self._check(max_l, restore)

    def _attend_diagonal(
        self,
        src: jax.Array,
        kv_refs: tuple[jax.Ref, jax.Ref],
        base: int,
        end: jax.Array,
    ) -> None:
        """Attends to a diagonal tile, the first one. base, end: see `Diagonals`."""
        blocks, axis = self.config.blocks, self.config.orientation.axis

        def mask(s: jax.Array, rows: pl.Slice, first_key: int) -> jax.Array:
            end_here = end - first_key
            return self.diagonals.mask(s, end_here, rows.start, axis, -jnp.inf)

        if self.carry:
            self._init_max()
        course = Course(
            self.diagonals.strips(blocks, base),
            (blocks.diagonal_ahead, blocks.diagonal_behind),
            mask,
            self._carried() if self.carry else self._nothing(),
        )
        max_l = lazy_tile(self.q, kv_refs, self.state, src, course, self.config)
        self._check(max_l, lambda: self._init(1 - src))

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
            k = k_ref[pl.ds(0, LANES), :]  # [128, D]
            s = self.config.scores(*orientation.ordered(q, k))
            self.state.at(src, rows, orientation).update_max([s], orientation)

        for_each_sub_block(self.config.blocks, step)

    def _attend_exactly(
        self, j: jax.Array, version: jax.Array, kv_refs: tuple[jax.Ref, jax.Ref]
    ) -> None:
        """Attends to the visible keys of a tile, in place."""
        tile_key, orientation = j * kv_refs[0].shape[0], self.config.orientation

        def attend(rows: pl.Slice, begin: jax.Array) -> Callable[[int], None]:
            first_key = tile_key + begin

            def mask(s: jax.Array, c: int) -> jax.Array:
                return self.bounds.mask(rows, first_key + c, s, orientation)

            def attend_to(width: int) -> None:
                k, v = (x.at[pl.ds(begin, width), :] for x in kv_refs)  # [width, D]
                state = self.state.at(version, rows, orientation)
                q = self.q[rows, :]  # [exact_rows, D]
                exact_tile(q, k, v, state, mask, self.config)

            return attend_to

        self.sub_blocks.for_each(self.config.blocks, tile_key, attend)


def stack_heads(x_ref: jax.Ref, buffer_ref: jax.Ref | tuple[()]) -> jax.Ref:
    """Returns [G, block_q, D] as [R, D]: itself where G is 1, else in the buffer."""
    if x_ref.shape[0] == 1:
        return x_ref.at[0]
    for head, rows in enumerate(stacked_rows(x_ref.shape[0], buffer_ref.shape[0])):
        buffer_ref[rows, :] = x_ref[head]  # [block_q, D]
    return buffer_ref
