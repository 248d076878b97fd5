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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .bounds import Strip
from .tile_config import TileConfig
from .vector import LANES, SUBLANES, Orientation, fold

NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Row maximum m before any key: finite, as -inf - -inf is nan."""

SUM_LIMIT = 2.0**30
"""Row sum of a lane beyond which a tile is computed again, with exact maxima.

Ordinary sums stay below the number of keys. Times values below 1e29, exponentials do
not overflow before their sum shows it.
"""


class SoftmaxState(NamedTuple):
    """Online softmax of a query tile, in VMEM: see `Orientation` for shapes.

    m: [R, 128] or [1, R], numbers of rows: their maxima, or older ones (see above).
    l: 2 x [R, 128] or [8, R], sums of the exponentials, not reduced.
    acc: 2 x [R, D] or [D, R], accumulators of P V.

    A full tile reads one version of l and acc and writes the other.
    """

    m: jax.Ref
    l: jax.Ref
    acc: jax.Ref

    @classmethod
    def shapes(cls, rows: int, depth: int, orientation: Orientation) -> "SoftmaxState":
        """Returns the memory to allocate. rows: R. depth: D."""

        def memory(width: int, *versions: int) -> Any:
            shape = orientation.ordered(rows, width)
            return pltpu.VMEM((*versions, *shape), jnp.float32)

        return cls(
            m=memory(orientation.number_width),
            l=memory(orientation.sum_width, 2),
            acc=memory(depth, 2),
        )

    def at(
        self, version: jax.Array, rows: pl.Slice, orientation: Orientation
    ) -> "SoftmaxState":
        """Returns some rows of one version."""
        return SoftmaxState(
            orientation.at(self.m, rows),
            orientation.at(self.l.at[version], rows),
            orientation.at(self.acc.at[version], rows),
        )

    def update_max(self, s: list[jax.Array], orientation: Orientation) -> None:
        """Raises m to the maxima of s, scores of these rows, and rescales l and acc."""
        m_prev = self.m[...]  # numbers of rows, as m and alpha
        m = jnp.maximum(m_prev, row_maxima(s, orientation))
        alpha = jnp.exp2(m_prev - m)
        self.m[...] = m
        self.l[...] *= alpha
        width = self.acc.shape[orientation.keys_axis]
        self.acc[...] *= orientation.widen(alpha, width)


class Start(NamedTuple):
    """What the softmax of some rows starts from: rows -> their l, acc so far.

    has_max: whether m is set; else it becomes the maximum of the masked sub-tiles.
    """

    l: Callable[[pl.Slice], jax.Array]
    acc: Callable[[pl.Slice], jax.Array]
    has_max: bool


class Course(NamedTuple):
    """How `lazy_tile` goes through a tile.

    pipeline: sub-tiles ahead and behind.
    mask: (scores, rows, first key) -> scores, -inf where masked.
    start: instead of the version of the state that is read.
    """

    strips: list[Strip]
    pipeline: tuple[int, int]
    mask: Callable[[jax.Array, pl.Slice, int], jax.Array] | None = None
    start: Start | None = None


def lazy_tile(
    q_ref: jax.Ref,  # [R, D]
    kv_refs: tuple[jax.Ref, jax.Ref],  # [block_k, D] each
    state: SoftmaxState,
    src: jax.Array,
    course: Course,
    config: TileConfig,
) -> jax.Array:
    """Attends to a tile without updating m.

    Its sub-tiles n of [rows, cols] ([cols, rows] where rows lie along the lanes) are
    software-pipelined so that the MXU does not wait for the VPU:

        MXU    S(n + ahead) = Q K^T         acc += P(n - behind) V
        VPU                   P(n) = exp2(S(n) - m), l += P(n)

    src: version of l and acc to read; 1 - src is written.

    Returns:
      The largest l of any row and lane. If it is above SUM_LIMIT, version 1 - src is
      void, and the caller runs `exact_tile` instead.
    """
    k_ref, v_ref = kv_refs
    orientation = config.orientation
    ahead, behind = course.pipeline
    subtiles = [(strip, c) for strip in course.strips for c in strip.columns]
    read = course.start or Start(
        lambda rows: orientation.at(state.l.at[src], rows)[...],
        lambda rows: orientation.at(state.acc.at[src], rows)[...],
        has_max=True,
    )

    def qk(n: int) -> jax.Array:
        strip, c = subtiles[n]
        q = q_ref[strip.rows, :]  # [rows, D]
        k = k_ref[pl.ds(c, strip.width), :]  # [cols, D]
        s = config.scores(*orientation.ordered(q, k))  # [rows, cols], or swapped
        is_masked = c in strip.columns[: strip.masked]
        return course.mask(s, strip.rows, c) if is_masked else s

    def pv(n: int, p: jax.Array, acc: jax.Array | None) -> jax.Array:
        (rows, columns, width, _), c = subtiles[n]
        if c == columns[0]:
            acc = read.acc(rows)
        v = v_ref[pl.ds(c, width), :]  # [cols, D]
        acc = acc + config.product(p, v, (orientation.keys_axis, 0))
        if c == columns[-1]:
            orientation.at(state.acc.at[1 - src], rows)[...] = acc
        return acc  # [rows, D], or swapped

    s_queue = deque()  # S(n) ... S(n + ahead)
    p_queue = deque()  # P(n - behind) ... P(n)
    coming = iter(range(len(subtiles)))  # of which S is to be issued
    l = acc = None
    max_l = jnp.zeros((SUBLANES, LANES), jnp.float32)  # [8, 128]
    for rows in [strip.rows for strip in course.strips if not strip.columns]:
        after = state.at(1 - src, rows, orientation)
        after.l[...], after.acc[...] = read.l(rows), read.acc(rows)
    for n, ((rows, columns, width, masked), c) in enumerate(subtiles):
        is_first = c == columns[0]
        needed = max(1 + ahead, masked if is_first else 0) - len(s_queue)
        s_queue.extend(map(qk, itertools.islice(coming, needed)))
        m_ref = orientation.at(state.m, rows)
        if is_first and not read.has_max:
            s = list(s_queue)[:masked]
            m_ref[...] = jnp.broadcast_to(row_maxima(s, orientation), m_ref.shape)
        m = orientation.widen(m_ref[...], width)  # meets S
        p = jnp.exp2(s_queue.popleft() - m)  # [rows, cols], or swapped
        if is_first:
            l = read.l(rows)
        l = l + fold(jnp.add, p, orientation.keys_axis)  # [rows, 128], or [8, rows]
        p_queue.append((n, p.astype(v_ref.dtype)))
        if len(p_queue) > behind:
            acc = pv(*p_queue.popleft(), acc)
        if c == columns[-1]:
            orientation.at(state.l.at[1 - src], rows)[...] = l
            folded = fold(jnp.maximum, l, orientation.axis)  # [8, 128]
            max_l = jnp.maximum(max_l, folded)
    while p_queue:
        acc = pv(*p_queue.popleft(), acc)
    return jnp.max(max_l)


def row_maxima(s: list[jax.Array], orientation: Orientation) -> jax.Array:
    """Returns maxima of the rows of s, at least NOTHING: [rows, 1] or [1, rows]."""
    axis = orientation.keys_axis
    folded = functools.reduce(
        jnp.maximum, [fold(jnp.maximum, part, axis) for part in s]
    )  # as l
    return jnp.maximum(folded.max(axis=axis, keepdims=True), NOTHING)


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
    cols, orientation = config.blocks.columns, config.orientation
    columns = range(0, k_ref.shape[0], cols)

    def masked_scores(c: int) -> jax.Array:
        k = k_ref[pl.ds(c, cols), :]  # [cols, D]
        s = config.scores(*orientation.ordered(q, k))  # [rows, cols], or swapped
        return mask(s, c)

    scores = [masked_scores(c) for c in columns]
    state.update_max(scores, orientation)
    l, acc = state.l[...], state.acc[...]
    m = orientation.widen(state.m[...], cols)
    for c, s in zip(columns, scores, strict=True):
        p = jnp.exp2(s - m)  # [rows, cols], or swapped
        l = l + fold(jnp.add, p, orientation.keys_axis)  # [rows, 128], or [8, rows]
        v = v_ref[pl.ds(c, cols), :]  # [cols, D]
        p = p.astype(v_ref.dtype)
        more = config.product(p, v, (orientation.keys_axis, 0))
        acc = acc + more  # [rows, D], or swapped
    state.l[...] = l
    state.acc[...] = acc
