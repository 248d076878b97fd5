"""Online softmax of the TPU forward kernel, with conditional rescale.

A full tile does not look for its row maxima. Any m below which the exponentials do not
underflow gives the same softmax, so each row keeps the m it has, and the MXU never
waits for a reduction over lanes. That fails only where scores rise far above m, which
shows in the row's sum l: such a tile is computed again, from the state before it, with
the exact maxima of FlashAttention (2205.14135). This is FlashAttention-4's conditional
rescale, decided per tile. Partial tiles always update m, and 128 keys initialise it.

Row sums are kept lane by lane, and reduced over the lanes when a row is done.
"""

import functools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .vector import LANES, NN, SUBLANES, TileConfig, broadcast_lanes, dot

NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Row maximum m before any key: finite, as -inf - -inf is nan."""

SUM_LIMIT = 2.0**30
"""Row sum of a lane beyond which a tile is computed again, with exact maxima.

Ordinary sums stay below the number of keys. Times values below 1e29, exponentials do
not overflow before their sum shows it.
"""


class SoftmaxState(NamedTuple):
    """Online softmax of a query tile, in VMEM.

    m: [R, 128], equal lanes: row maxima, or older ones (see above).
    l: [2, R, 128], row sums of the exponentials, lane by lane.
    acc: [2, R, D], accumulator of P V.

    A full tile reads one version of l and acc and writes the other.
    """

    m: jax.Ref
    l: jax.Ref
    acc: jax.Ref

    def at(self, version: jax.Array, rows: pl.Slice) -> "SoftmaxState":
        """Returns some rows of one version: m and l [rows, 128], acc [rows, D]."""
        return SoftmaxState(
            self.m.at[rows, :],
            self.l.at[version, rows, :],
            self.acc.at[version, rows, :],
        )

    def update_max(self, s: list[jax.Array]) -> None:
        """Raises m to the maxima of s, each [rows, cols], and rescales l and acc."""
        lane_max = functools.reduce(
            jnp.maximum, [_reduce_to_lanes(jnp.maximum, part) for part in s]
        )  # [rows, 128]
        m_prev = self.m[...]  # [rows, 128]
        m = jnp.maximum(m_prev, lane_max.max(axis=1, keepdims=True))  # [rows, 128]
        alpha = jnp.exp2(m_prev - m)  # [rows, 128]
        self.m[...] = m
        self.l[...] *= alpha
        self.acc[...] *= broadcast_lanes(alpha, self.acc.shape[-1])  # [rows, D]


def _reduce_to_lanes(combine: Callable, x: jax.Array) -> jax.Array:
    """Combines strips of 128 columns, lane by lane: [rows, cols] -> [rows, 128]."""
    strips = [x[:, c : c + LANES] for c in range(0, x.shape[1], LANES)]
    return functools.reduce(combine, strips)


def full_tile(
    q_ref: jax.Ref,  # [R, D]
    k_ref: jax.Ref,  # [block_k, D]
    v_ref: jax.Ref,  # [block_k, D]
    state: SoftmaxState,  # m [R, 128], l [2, R, 128], acc [2, R, D]
    src: jax.Array,
    config: TileConfig,
) -> jax.Array:
    """Attends to a tile without a mask and without updating m.

    The tile is cut into sub-tiles n of [rows, cols], software-pipelined so that the MXU
    does not wait for the VPU:

        MXU    S(n + ahead) = Q K^T         acc += P(n - behind) V
        VPU                   P(n) = exp2(S(n) - m), l += P(n)

    src: version of l and acc to read; 1 - src is written.

    Returns:
      The largest l of any row and lane. If it is above SUM_LIMIT, version 1 - src is
      void, and the caller runs `exact_tile` from version src instead.
    """
    cols = config.blocks.columns
    last = k_ref.shape[0] - cols
    subtiles = [
        (pl.ds(r, config.blocks.rows), c)
        for r in range(0, q_ref.shape[0], config.blocks.rows)
        for c in range(0, last + 1, cols)
    ]

    def qk(n: int) -> jax.Array:
        rows, c = subtiles[n]
        q = q_ref[rows, :]  # [rows, D]
        k = k_ref[pl.ds(c, cols), :]  # [cols, D]
        return config.scores(q, k)  # [rows, cols]

    def pv(n: int, p: jax.Array, acc: jax.Array | None) -> jax.Array:
        rows, c = subtiles[n]
        if c == 0:
            acc = state.acc[src, rows, :]  # [rows, D]
        v = v_ref[pl.ds(c, cols), :]  # [cols, D]
        acc = acc + dot(p, v, NN, config.precision)  # [rows, D]
        if c == last:
            state.acc[1 - src, rows, :] = acc
        return acc

    ahead = min(config.blocks.ahead, len(subtiles))
    s_queue = deque(qk(n) for n in range(ahead))  # S(n) ... S(n + ahead - 1)
    p_queue = deque()  # P(n - behind) ... P(n)
    l = acc = None
    max_l = jnp.zeros((SUBLANES, LANES), jnp.float32)  # [8, 128]
    for n, (rows, c) in enumerate(subtiles):
        if n + ahead < len(subtiles):
            s_queue.append(qk(n + ahead))
        m = broadcast_lanes(state.m[rows, :], cols)  # [rows, cols]
        p = jnp.exp2(s_queue.popleft() - m)  # [rows, cols]
        if c == 0:
            l = state.l[src, rows, :]  # [rows, 128]
        l = l + _reduce_to_lanes(jnp.add, p)  # [rows, 128]
        p_queue.append((n, p.astype(v_ref.dtype)))
        if len(p_queue) > config.blocks.behind:
            acc = pv(*p_queue.popleft(), acc)
        if c == last:
            state.l[1 - src, rows, :] = l
            for r in range(0, config.blocks.rows, SUBLANES):
                max_l = jnp.maximum(max_l, l[r : r + SUBLANES])  # [8, 128]
    while p_queue:
        acc = pv(*p_queue.popleft(), acc)
    return jnp.max(max_l)


def exact_tile(
    q: jax.Array,  # [rows, D]
    k_ref: jax.Ref,  # [keys, D]
    v_ref: jax.Ref,  # [keys, D]
    state: SoftmaxState,  # m, l [rows, 128], acc [rows, D]
    mask: Callable[[jax.Array, int], jax.Array],
    config: TileConfig,
) -> None:
    """Attends to some keys as FlashAttention does: m first, from all scores, then P V.

        MXU    S(0) S(1) ...                         acc += P(0) V    acc += P(1) V
        VPU            mask, m = max(m, S), rescale  P(0), l += P(0)  P(1), l += P(1)

    state: of these rows, read and written in place.
    mask: (scores [rows, cols], their first column) -> scores, -inf where masked.
    """
    cols = config.blocks.columns
    columns = range(0, k_ref.shape[0], cols)
    scores = [  # [rows, cols] each
        mask(config.scores(q, k_ref[pl.ds(c, cols), :]), c) for c in columns
    ]
    state.update_max(scores)
    l, acc = state.l[...], state.acc[...]  # [rows, 128], [rows, D]
    m = broadcast_lanes(state.m[...], cols)  # [rows, cols]
    for c, s in zip(columns, scores, strict=True):
        p = jnp.exp2(s - m)  # [rows, cols]
        l = l + _reduce_to_lanes(jnp.add, p)  # [rows, 128]
        p = p.astype(v_ref.dtype)  # [rows, cols]
        v = v_ref[pl.ds(c, cols), :]  # [cols, D]
        acc = acc + dot(p, v, NN, config.precision)  # [rows, D]
    state.l[...] = l
    state.acc[...] = acc
