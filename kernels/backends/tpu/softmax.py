"""Online softmax of the TPU forward kernel, with conditional rescale.

A full tile does not look for its row maxima. Any m below which the exponentials do not
underflow gives the same softmax, so each row keeps the m it has, and the MXU never
waits for a reduction over lanes. That fails only where scores rise far above m, which
shows in the row's sum l: such a tile is computed again, from the state before it, with
the exact maxima of FlashAttention (2205.14135). This is FlashAttention-4's conditional
rescale, decided per tile. Partial tiles always update m, and 128 keys initialise it.

Row sums are kept lane by lane (or sublane by sublane), and reduced when a row is done.
"""

import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .bounds import Strip
from .tile_config import TileConfig
from .vector import LANES, Orientation

NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Row maximum m before any key: finite, as -inf - -inf is nan."""

SUM_LIMIT = 2.0**30
"""Row sum of a lane beyond which a tile is computed again, with exact maxima.

Ordinary sums stay below the number of keys. Times values below 1e29, exponentials do
not overflow before their sum shows it.
"""


class Carry(NamedTuple):
    """A partial result over other keys, of the ring steps before.

    It acts as one more key, with score lse and value out, that every row has attended
    to. Rows that have attended to no key yet have lse NOTHING and out 0.

    out: float32 accumulators: as `ForwardOperands.q`, or its last two axes swapped.
    lse: [M, X, query tiles, ...], base 2, `Orientation.packed`.
    """

    out: jax.Array
    lse: jax.Array


class SoftmaxState(NamedTuple):
    """Online softmax of a query tile, in VMEM: see `Orientation` for shapes.

    m: [R, 128] or [1, R], numbers of rows: their maxima, or older ones (see above).
    l: 2 x [R, 128] or [8, R], sums of the exponentials, not reduced.
    acc: 2 x [R, D] or [D, R], accumulators of P V.

    l and acc have two versions. A full or diagonal tile reads one and writes the other,
    so what was before it is there if the tile must be computed again.
    """

    m: jax.Ref
    l: jax.Ref
    acc: jax.Ref

    @classmethod
    def shapes(cls, rows: int, depth: int, orientation: Orientation) -> "SoftmaxState":
        """Returns the memory to allocate. rows: R. depth: D."""
        m = orientation.ordered(rows, orientation.number_width)
        l = orientation.ordered(rows, orientation.sum_width)
        acc = orientation.ordered(rows, depth)
        return cls(
            m=pltpu.VMEM(m, jnp.float32),
            l=pltpu.VMEM((2, *l), jnp.float32),
            acc=pltpu.VMEM((2, *acc), jnp.float32),
        )

    def at(
        self, version: int | jax.Array, rows: pl.Slice, orientation: Orientation
    ) -> "SoftmaxState":
        """Returns some rows of one version."""
        return SoftmaxState(
            orientation.at(self.m, rows),
            orientation.at(self.l.at[version], rows),
            orientation.at(self.acc.at[version], rows),
        )

    def update_max(self, s: list[jax.Array], orientation: Orientation) -> None:
        """Raises m to the maxima of s, scores of these rows, and rescales l and acc."""
        # Where no key came before, l and acc are 0 and any finite alpha will do: hence
        # a finite NOTHING.
        m_prev = self.m[...]  # numbers of rows, as m and alpha
        m = jnp.maximum(m_prev, row_maxima(s, orientation))
        alpha = jnp.exp2(m_prev - m)
        self.m[...] = m
        self.l[...] *= alpha
        width = self.acc.shape[orientation.keys_axis]
        self.acc[...] *= orientation.widen(alpha, width)


class InitialState(NamedTuple):
    """What the softmax of a tile starts from.

    l, acc: rows -> l [rows, 128] or [8, rows], acc [rows, D] or [D, rows].
    has_max: whether m is set; else it becomes the maximum of the masked sub-tiles.
    """

    l: Callable[[pl.Slice], jax.Array]
    acc: Callable[[pl.Slice], jax.Array]
    has_max: bool

    @classmethod
    def from_version(
        cls, state: SoftmaxState, version: jax.Array, orientation: Orientation
    ) -> "InitialState":
        """Goes on from a version of the state."""

        def sums(rows: pl.Slice) -> jax.Array:
            return orientation.at(state.l.at[version], rows)[...]

        def accumulators(rows: pl.Slice) -> jax.Array:
            return orientation.at(state.acc.at[version], rows)[...]

        return cls(sums, accumulators, has_max=True)

    @classmethod
    def empty(cls, state: SoftmaxState, orientation: Orientation) -> "InitialState":
        """Starts before any key; m is not set."""

        def sums(rows: pl.Slice) -> jax.Array:
            return jnp.zeros_like(orientation.at(state.l.at[0], rows))

        def accumulators(rows: pl.Slice) -> jax.Array:
            return jnp.zeros_like(orientation.at(state.acc.at[0], rows))

        return cls(sums, accumulators, has_max=False)

    @classmethod
    def from_carry(
        cls, carry: Carry, m_ref: jax.Ref, block_q: int, orientation: Orientation
    ) -> "InitialState":
        """Starts from one more key of score lse and value out: l = 1, acc = out.

        carry: of the query tile, in VMEM. m_ref: [R, 128] or [1, R], already lse.
        """

        def sums(rows: pl.Slice) -> jax.Array:
            m = orientation.at(m_ref, rows)[...]  # numbers of rows
            # Each lane holds a part of the sum: together 1, or 0 of rows without a key.
            part = jnp.where(m > NOTHING, 1 / orientation.sum_width, 0.0)
            shape = orientation.ordered(rows.size, orientation.sum_width)
            return jnp.broadcast_to(part, shape)

        def accumulators(rows: pl.Slice) -> jax.Array:
            # Stacked rows may belong to several heads, which the carry holds apart.
            size = min(block_q, rows.size)
            heads = []
            for first in range(rows.start, rows.start + rows.size, size):
                head = carry.out.at[first // block_q]  # [block_q, D], or swapped
                heads.append(orientation.at(head, pl.ds(first % block_q, size))[...])
            return jnp.concatenate(heads, orientation.axis)  # [rows, D], or swapped

        return cls(sums, accumulators, has_max=True)

    def store(self, rows: pl.Slice, state: SoftmaxState) -> None:
        """Sets l and acc of some rows. state: of these rows."""
        l = self.l(rows)  # [rows, 128], or [8, rows]
        acc = self.acc(rows)  # [rows, D], or swapped
        state.l[...] = l
        state.acc[...] = acc


class LazyPlan(NamedTuple):
    """How a `LazyTile` goes through a tile.

    ahead, behind: sub-tiles, see `TpuBlocks`.
    mask: (scores, rows, first key) -> scores, -inf where masked.
    initial: instead of the version of the state that is read.
    """

    strips: list[Strip]
    ahead: int
    behind: int
    mask: Callable[[jax.Array, pl.Slice, int], jax.Array] | None = None
    initial: InitialState | None = None


class LazyTile(NamedTuple):
    """A key tile that a query tile attends to without updating m.

    Its sub-tiles n of [rows, cols] ([cols, rows] where rows lie along the lanes) are
    software-pipelined so that the MXU does not wait for the VPU:

        MXU    S(n + ahead) = Q K^T         acc += P(n - behind) V
        VPU                   P(n) = exp2(S(n) - m), l += P(n)

    src: version of l and acc to read; 1 - src is written.
    """

    q: jax.Ref  # [R, D]
    k: jax.Ref  # [block_k, D]
    v: jax.Ref  # [block_k, D]
    state: SoftmaxState
    src: jax.Array
    plan: LazyPlan
    config: TileConfig

    @property
    def initial(self) -> InitialState:
        """What l and acc of rows start from, before this tile."""
        return self.plan.initial or InitialState.from_version(
            self.state, self.src, self.config.orientation
        )

    def attend(self) -> jax.Array:
        """Writes version 1 - src of l and acc.

        Returns:
          The largest l of any row and lane. If it is above SUM_LIMIT, version 1 - src
          is void, and the caller runs `exact_tile` instead.
        """
        state, plan = self.state, self.plan
        orientation = self.config.orientation
        initial = self.initial
        s_queue = deque()  # S(n) ... S(n + ahead)
        p_queue = deque()  # P(n - behind) ... P(n), each with its strip and column
        subtiles = [(strip, c) for strip in plan.strips for c in strip.columns]
        unissued = iter(subtiles)  # whose S is to be issued
        l = None
        acc = None
        max_l = jnp.zeros((orientation.sublanes, LANES), jnp.float32)  # [8, 128]
        for strip in plan.strips:
            if not strip.columns:
                # These rows see nothing here, but version 1 - src is what goes on.
                after = state.at(1 - self.src, strip.rows, orientation)
                initial.store(strip.rows, after)
        for strip, c in subtiles:
            is_first = c == strip.columns[0]
            # All masked sub-tiles of a strip are issued first: m is their maximum.
            needed = max(1 + plan.ahead, strip.masked if is_first else 0)
            for issued in itertools.islice(unissued, needed - len(s_queue)):
                s_queue.append(self._scores(*issued))
            m_ref = orientation.at(state.m, strip.rows)
            if is_first and not initial.has_max:
                maxima = row_maxima(list(s_queue)[: strip.masked], orientation)
                m_ref[...] = jnp.broadcast_to(maxima, m_ref.shape)
            m = orientation.widen(m_ref[...], strip.width)  # meets S
            p = jnp.exp2(s_queue.popleft() - m)  # [rows, cols], or swapped
            if is_first:
                l = initial.l(strip.rows)  # [rows, 128], or [8, rows]
            # Lane by lane: a sum over lanes would hold up the next matmul.
            l = l + orientation.fold(jnp.add, p, orientation.keys_axis)
            # Rounded for the MXU alone: l has summed P in float32.
            p_queue.append((strip, c, p.astype(self.v.dtype)))
            if len(p_queue) > plan.behind:
                acc = self._add_values(*p_queue.popleft(), acc)
            if c == strip.columns[-1]:
                orientation.at(state.l.at[1 - self.src], strip.rows)[...] = l
                folded = orientation.fold(jnp.maximum, l, orientation.axis)  # [8, 128]
                max_l = jnp.maximum(max_l, folded)
        while p_queue:
            acc = self._add_values(*p_queue.popleft(), acc)
        return jnp.max(max_l)

    def _scores(self, strip: Strip, column: int) -> jax.Array:
        """Returns scores of a sub-tile, [rows, cols] or swapped."""
        q = self.q[strip.rows, :]  # [rows, D]
        k = self.k[pl.ds(column, strip.width), :]  # [cols, D]
        s = self.config.scores(q, k)
        if self.plan.mask and column in strip.columns[: strip.masked]:
            s = self.plan.mask(s, strip.rows, column)
        return s

    def _add_values(
        self, strip: Strip, column: int, p: jax.Array, acc: jax.Array | None
    ) -> jax.Array:
        """Returns acc + P V, [rows, D] or swapped, and stores it after a strip's last.

        acc: of the strip so far; not read before its first sub-tile.
        """
        orientation = self.config.orientation
        if column == strip.columns[0]:
            acc = self.initial.acc(strip.rows)
        v = self.v[pl.ds(column, strip.width), :]  # [cols, D]
        acc = acc + self.config.product(p, v, (orientation.keys_axis, 0))
        if column == strip.columns[-1]:
            orientation.at(self.state.acc.at[1 - self.src], strip.rows)[...] = acc
        return acc


def row_maxima(s: list[jax.Array], orientation: Orientation) -> jax.Array:
    """Returns maxima of the rows of s, at least NOTHING: [rows, 1] or [1, rows]."""
    axis = orientation.keys_axis
    folded = [orientation.fold(jnp.maximum, part, axis) for part in s]  # as l
    maxima = functools.reduce(jnp.maximum, folded)  # as l
    # Where all are masked, m of -inf would make exp2(-inf - -inf): nan.
    return jnp.maximum(maxima.max(axis=axis, keepdims=True), NOTHING)


def exact_tile(
    q: jax.Array,  # [rows, D]
    k_ref: jax.Ref,  # [keys, D]
    v_ref: jax.Ref,  # [keys, D]
    state: SoftmaxState,
    mask: Callable[[jax.Array, int], jax.Array],
    config: TileConfig,
) -> None:
    """Attends to some keys as FlashAttention does: m first, from all scores, then P V.

        MXU    S(0) S(1) ...                         acc += P(0) V    acc += P(1) V
        VPU            mask, m = max(m, S), rescale  P(0), l += P(0)  P(1), l += P(1)

    state: of these rows, read and written in place.
    mask: (scores of `columns` keys, the first of them) -> scores, -inf where masked.
    """
    width = config.blocks.columns
    orientation = config.orientation
    columns = range(0, k_ref.shape[0], width)
    scores = []
    for c in columns:
        k = k_ref[pl.ds(c, width), :]  # [cols, D]
        scores.append(mask(config.scores(q, k), c))  # [rows, cols], or swapped
    # Rescales l and acc too, before anything is added that is relative to the new m.
    state.update_max(scores, orientation)
    l = state.l[...]  # [rows, 128], or [8, rows]
    acc = state.acc[...]  # [rows, D], or swapped
    m = orientation.widen(state.m[...], width)  # meets S
    for c, s in zip(columns, scores, strict=True):
        p = jnp.exp2(s - m)  # [rows, cols], or swapped
        l = l + orientation.fold(jnp.add, p, orientation.keys_axis)
        v = v_ref[pl.ds(c, width), :]  # [cols, D]
        acc = acc + config.product(p.astype(v_ref.dtype), v, (orientation.keys_axis, 0))
    state.l[...] = l
    state.acc[...] = acc
