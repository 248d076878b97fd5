"""The online softmax of the TPU forward kernel, with a lazy maximum.

Full tiles are computed without looking for their maximum. Any reference below which
the exponentials do not underflow gives the same softmax, so each row keeps the one it
has, and the matrix unit never waits for a reduction. That fails only where scores rise
far above the reference, which shows in the row's sum: such a tile is computed again,
from the state before it, with the maxima that FlashAttention (2205.14135) takes.
Partial tiles always take them, and a first look at some keys finds a first reference.

Sums are kept lane by lane, and reduced over the lanes when a row is done.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .tile import (
    INNER,
    LANES,
    OUTER,
    SUBLANES,
    Edges,
    as_integers,
    dot,
    rows_to_lanes,
    spread,
)

NOTHING = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Reference of a row that has seen nothing: finite, as -inf - -inf is nan."""

SUM_LIMIT = 2.0**30
"""Sum of a lane beyond which the rows get new references.

The sum of ordinary rows stays below the number of keys. Weighted with values below
1e29, exponentials do not overflow before their sum shows it.
"""


class ForwardTile(NamedTuple):
    """How a program computes its tiles.

    rows: query rows of a sub-block of a full tile.
    columns: key slots of a piece of its scores.
    ahead: by how many pieces scores are issued before they are needed.
    behind: by how many pieces products with values are issued after they could be.
    exact_rows: query rows of a sub-block where the maximum is taken.
    live_columns: granule in which such a sub-block skips keys that no row sees.
    scale: factor on the products of queries and keys, for exponents of 2.
    precision: of the matrix products.
    """

    rows: int
    columns: int
    ahead: int
    behind: int
    exact_rows: int
    live_columns: int
    scale: float
    precision: lax.Precision

    def scores(self, q: jax.Array, k: jax.Array) -> jax.Array:
        """(rows, D), (columns, D) -> (rows, columns)."""
        return self.scale * dot(q, k, OUTER, self.precision)


class Softmax(NamedTuple):
    """State of a query tile, in VMEM.

    reference: (R, LANES), equal lanes: what scores are taken relative to.
    total: (2, R, LANES), sums of the exponentials, lane by lane.
    result: (2, R, D), sums of the values, weighted with the exponentials.

    Totals and results have two versions: one before and one after a full tile.
    """

    reference: jax.Ref
    total: jax.Ref
    result: jax.Ref

    def at(self, version: jax.Array, rows: pl.Slice) -> "Softmax":
        """The part of one version that belongs to some rows."""
        return Softmax(
            self.reference.at[rows, :],
            self.total.at[version, rows, :],
            self.result.at[version, rows, :],
        )

    def raise_reference(self, scores: list[jax.Array]) -> None:
        """Takes the maximum of the scores, (rows, columns) each, as new reference."""
        highest = functools.reduce(
            jnp.maximum, [_lanewise(jnp.maximum, piece) for piece in scores]
        )
        old = self.reference[...]
        new = jnp.maximum(old, highest.max(axis=1, keepdims=True))
        decay = jnp.exp2(old - new)
        self.reference[...] = new
        self.total[...] *= decay
        self.result[...] *= spread(decay, self.result.shape[-1])


class Bounds(NamedTuple):
    """Visible key slots of a query tile's rows.

    start, stop: int32 (R, LANES), equal lanes, in VMEM.
    edges: what its sub-blocks touch.
    """

    start: jax.Ref
    stop: jax.Ref
    edges: Edges

    def spread(self, bounds: jax.Ref) -> None:
        """Fills start and stop from bounds `as_floats`, (2, R / LANES, LANES)."""
        for number, bound in enumerate((self.start, self.stop)):
            for group in range(bounds.shape[1]):
                row = bounds[number, pl.ds(group, 1), :]
                rows = pl.ds(group * LANES, LANES)
                bound[rows, :] = as_integers(rows_to_lanes(row))

    def hide(
        self, rows: pl.Slice, slot: jax.Array, scores: jax.Array, column: int
    ) -> jax.Array:
        """Scores (rows, columns) of keys from slot + column on, -inf where unseen."""
        slots = lax.broadcasted_iota(jnp.int32, scores.shape, 1) + (slot + column)
        start, stop = (
            spread(bound[rows, :], scores.shape[1]) for bound in (self.start, self.stop)
        )
        return jnp.where((start <= slots) & (slots < stop), scores, -jnp.inf)


def _lanewise(combine: Callable, x: jax.Array) -> jax.Array:
    """(rows, columns) -> (rows, LANES), combined lane by lane."""
    parts = [x[:, c : c + LANES] for c in range(0, x.shape[1], LANES)]
    return functools.reduce(combine, parts)


def full_tile(
    q: jax.Ref,
    k: jax.Ref,
    v: jax.Ref,
    state: Softmax,
    version: jax.Array,
    tile: ForwardTile,
) -> jax.Array:
    """Computes a tile that all rows see, with the references that they have.

    q: (R, D). k, v: (block_k, D). version: the one to start from; the other is written.

    Returns:
      The largest sum of a lane; what was written is void if it is above SUM_LIMIT.
    """
    first, last = 0, k.shape[0] - tile.columns
    pieces = [
        (pl.ds(r, tile.rows), c)
        for r in range(0, q.shape[0], tile.rows)
        for c in range(first, last + 1, tile.columns)
    ]

    def scores(rows: pl.Slice, c: int) -> jax.Array:
        return tile.scores(q[rows, :], k[pl.ds(c, tile.columns), :])

    def weigh(rows: pl.Slice, c: int, p: jax.Array) -> None:
        nonlocal result
        old = state.at(version, rows).result[...] if c == first else result
        result = old + dot(p, v[pl.ds(c, tile.columns), :], INNER, tile.precision)
        if c == last:
            state.at(1 - version, rows).result[...] = result

    upcoming = [scores(*piece) for piece in pieces[: tile.ahead]]
    waiting, total, result = [], None, None
    worst = jnp.zeros((SUBLANES, LANES), jnp.float32)
    for number, (rows, c) in enumerate(pieces):
        upcoming += [scores(*piece) for piece in pieces[number + tile.ahead :][:1]]
        old = state.at(version, rows)
        p = jnp.exp2(upcoming.pop(0) - spread(old.reference[...], tile.columns))
        total = (old.total[...] if c == first else total) + _lanewise(jnp.add, p)
        waiting.append((rows, c, p.astype(v.dtype)))
        if len(waiting) > tile.behind:
            weigh(*waiting.pop(0))
        if c == last:
            state.at(1 - version, rows).total[...] = total
            for r in range(0, tile.rows, SUBLANES):
                worst = jnp.maximum(worst, total[r : r + SUBLANES])
    for piece in waiting:
        weigh(*piece)
    return jnp.max(worst)


def exact_step(
    q: jax.Array,
    k: jax.Ref,
    v: jax.Ref,
    state: Softmax,
    hide: Callable[[jax.Array, int], jax.Array],
    tile: ForwardTile,
) -> None:
    """A step of the online softmax for some rows, relative to their new maximum.

    q: (rows, D). k, v: (width, D). state: that of the rows.
    hide: (scores (rows, columns), their first column) -> scores, -inf where not seen.
    """
    pieces = [pl.ds(c, tile.columns) for c in range(0, k.shape[0], tile.columns)]
    scores = [hide(tile.scores(q, k[piece, :]), piece.start) for piece in pieces]
    state.raise_reference(scores)
    total, result = state.total[...], state.result[...]
    reference = spread(state.reference[...], tile.columns)
    for piece, s in zip(pieces, scores, strict=True):
        p = jnp.exp2(s - reference)
        total = total + _lanewise(jnp.add, p)
        result = result + dot(p.astype(v.dtype), v[piece, :], INNER, tile.precision)
    state.total[...] = total
    state.result[...] = result
