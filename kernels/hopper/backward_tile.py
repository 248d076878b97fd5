"""Tiles of the Hopper backward kernel: their cut, operands, shared memory and order.

See `hopper_backward`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from . import shared as gpu

ROWS = 64
"""Rows of a product of a warpgroup: one WGMMA."""

COMPUTING = 2
"""Warpgroups that compute. One more copies."""

WIDEST = 128
"""Columns of dk and dv that a warpgroup has registers for."""


class BackwardTile(NamedTuple):
    """How a program computes its tiles.

    depth: head size. Up to WIDEST a warpgroup has half of the keys of a tile. Above, it
      has half of the columns, and both compute all weights; then there is no dq.
    block_q: queries of a tile. With dq, block_q · depth is twice ROWS · ROWS.
    q_stages: query tiles in shared memory.
    d_out_stages: the same for the gradients of their results.
    scale: factor on gradients of scores.
    exponent_scale: factor on the products of queries and keys, for exponents of 2.
    products: what adds up the products.
    """

    depth: int
    block_q: int
    q_stages: int
    d_out_stages: int
    scale: float
    exponent_scale: float
    products: gpu.Registers | gpu.Emulated

    @property
    def cuts_keys(self) -> bool:
        """Whether a warpgroup has some of the keys, rather than of the columns."""
        return self.depth <= WIDEST

    @property
    def block_k(self) -> int:
        """Key slots of a tile."""
        return COMPUTING * ROWS if self.cuts_keys else ROWS

    @property
    def columns(self) -> int:
        """Columns of dk and dv that a warpgroup has."""
        return self.depth if self.cuts_keys else self.depth // COMPUTING


class Operands(NamedTuple):
    """What the backward kernel reads. T and S are whole tiles.

    live: int32 (M, key tiles, 2), half-open range of query tiles that are not empty.
    full: int32 (M, S / ROWS, 2), those that see all of some key slots; M is B or 1.
    keys, values: (B, S, K, D). q, d_out: (B, T, H, D).
    rows: float32 (B, H, query tiles, 2, block_q): lse for exponents of 2, and delta
      times `scale`.
    bounds: int32 (M, query tiles, 2, block_q): start and stop.
    """

    live: jax.Array
    full: jax.Array
    keys: jax.Array
    values: jax.Array
    q: jax.Array
    d_out: jax.Array
    rows: jax.Array
    bounds: jax.Array


class Scratch(NamedTuple):
    """Shared memory of a program, and its barriers.

    ds, dq: gradients of scores, and what is added to dq; () without dq.
    *_here: a copy has arrived. *_free: both warpgroups are done with a tile.
    ds_free: both have written one ds, and read the one before.
    """

    keys: jax.Ref  # (block_k, D)
    values: jax.Ref
    q: jax.Ref  # (stages, block_q, D)
    d_out: jax.Ref
    rows: jax.Ref  # (stages, 2, block_q)
    bounds: jax.Ref
    ds: jax.Ref | tuple[()]  # (2, COMPUTING * ROWS, block_q)
    dq: jax.Ref | tuple[()]  # (COMPUTING, ROWS, ROWS)
    dk_sum: tuple
    dv_sum: tuple
    keys_here: jax.Ref
    values_here: jax.Ref
    q_here: jax.Ref
    d_out_here: jax.Ref
    q_free: jax.Ref
    d_out_free: jax.Ref
    ds_free: jax.Ref

    @classmethod
    def shapes(cls, tile: BackwardTile, dtype: jnp.dtype, has_dq: bool):
        keys = gpu.shared_tile((tile.block_k, tile.depth), dtype)
        queries = tile.block_q, tile.depth
        numbers = tile.q_stages, 2, tile.block_q
        ds = gpu.shared_tile((2, COMPUTING * ROWS, tile.block_q), dtype)
        dq = gpu.shared_tile((COMPUTING, ROWS, ROWS), jnp.float32)
        total = tile.products.scratch(COMPUTING, ROWS, tile.columns)
        both = functools.partial(gpu.Barrier, num_arrivals=COMPUTING)
        return cls(
            keys,
            keys,
            gpu.shared_tile((tile.q_stages, *queries), dtype),
            gpu.shared_tile((tile.d_out_stages, *queries), dtype),
            gpu.shared_numbers(numbers, jnp.float32),
            gpu.shared_numbers(numbers, jnp.int32),
            ds if has_dq else (),
            dq if has_dq else (),
            total,
            total,
            gpu.Barrier(),
            gpu.Barrier(),
            gpu.Barrier(num_arrivals=3, num_barriers=tile.q_stages),
            gpu.Barrier(num_barriers=tile.d_out_stages),
            both(num_barriers=tile.q_stages),
            both(num_barriers=tile.d_out_stages),
            both(),
        )


class Visit(NamedTuple):
    """A query tile, by its number, of a query head."""

    i: jax.Array
    head: jax.Array


class Visits(NamedTuple):
    """The query tiles that a key tile visits: of each head, one head after another.

    begin, end: the live ones. head: the first one. group: how many heads.
    """

    begin: jax.Array
    end: jax.Array
    head: jax.Array
    group: int

    def count(self) -> jax.Array:
        return (self.end - self.begin) * self.group

    def first(self) -> Visit:
        return Visit(self.begin, self.head)

    def after(self, visit: Visit) -> Visit:
        is_last = visit.i + 1 == self.end
        i = jnp.where(is_last, self.begin, visit.i + 1)
        return Visit(i, jnp.where(is_last, visit.head + 1, visit.head))

    def before(self, visit: Visit) -> Visit:
        """The one before. Of the first, no visit at all."""
        is_first = visit.i == self.begin
        i = jnp.where(is_first, self.end - 1, visit.i - 1)
        return Visit(i, jnp.where(is_first, visit.head - 1, visit.head))


class Part(NamedTuple):
    """What a warpgroup computes of a tile.

    first_key: where its keys begin. columns: of dk and dv.
    """

    tile: BackwardTile
    warpgroup: jax.Array
    first_key: jax.Array
    columns: pl.Slice

    @classmethod
    def of(cls, tile: BackwardTile, warpgroup: jax.Array) -> "Part":
        if tile.cuts_keys:
            return cls(tile, warpgroup, warpgroup * ROWS, pl.ds(0, tile.columns))
        # That is 0, which ptxas does not know: else it keeps all addresses of keys.
        first_key = lax.div(warpgroup, jnp.int32(COMPUTING)) * ROWS
        columns = pl.ds(warpgroup * tile.columns, tile.columns)
        return cls(tile, warpgroup, first_key, columns)

    @property
    def keys(self) -> pl.Slice:
        return pl.ds(self.first_key, ROWS)

    @property
    def ds(self) -> pl.Slice:
        """Where it writes gradients of scores."""
        return pl.ds(self.warpgroup * ROWS, ROWS)

    def share(self) -> tuple[pl.Slice, pl.Slice]:
        """The queries and the columns of dq that it adds to."""
        own, first = pl.ds(self.warpgroup * ROWS, ROWS), pl.ds(0, ROWS)
        return (own, first) if self.tile.block_q > ROWS else (first, own)
