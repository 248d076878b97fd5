"""Cutting (B, T, H, D) arrays into the tiles that loops go over.

Rows of the query heads that share a key/value head are stacked in a tile: R = G ·
block_q rows, G query heads. Batch rows that share their bounds are folded into the
heads: M rows of bounds, and X = B / M · K heads in each.
"""

import functools
from dataclasses import astuple, dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..masks import Array, in_interval
from ..precision import accumulator_type


@dataclass(frozen=True)
class BlockSizes:
    """Query rows and key slots of one tile of the score matrix."""

    block_q: int
    block_k: int

    def __post_init__(self):
        if not all(type(size) is int and size > 0 for size in astuple(self)):
            raise ValueError(f"{self} must be two integers from 1 on")


class Tiling(NamedTuple):
    """Sizes of a problem and of its tiles, with methods that cut and join arrays."""

    block_q: int
    block_k: int
    batch: int
    length: int
    keys: int
    kv_heads: int
    group: int  # query heads of a key/value head
    bound_rows: int  # M: 1 where the batch shares its bounds, else the batch
    dtype: jnp.dtype  # of scores and sums

    @classmethod
    def of(
        cls,
        q: jax.Array,
        k: jax.Array,
        k_start: Array,
        sizes: BlockSizes,
    ) -> "Tiling":
        """Builds the tiling of an attention of q (B, T, H, D) to k (B, S, K, D).

        k_start: bounds of the rows, (M, T).
        """
        batch, length, heads, _ = q.shape
        keys, kv_heads = k.shape[1:3]
        # A problem shorter than a tile is a tile of its own length: nothing is padded.
        return cls(
            block_q=min(sizes.block_q, length),
            block_k=min(sizes.block_k, keys),
            batch=batch,
            length=length,
            keys=keys,
            kv_heads=kv_heads,
            group=heads // kv_heads,
            bound_rows=k_start.shape[0],
            dtype=accumulator_type(q.dtype),
        )

    @property
    def query_tiles(self) -> int:
        return -(-self.length // self.block_q)

    @property
    def key_tiles(self) -> int:
        return -(-self.keys // self.block_k)

    def mask(self, bounds: tuple[jax.Array, jax.Array], j: jax.Array) -> jax.Array:
        """Returns the mask (R, block_k) of one tile from bounds of its rows, (R,)."""
        # Keys after the end have numbers that no interval reaches: they need no check.
        k_start = bounds[0][:, None]  # (R, 1)
        k_end = bounds[1][:, None]  # (R, 1)
        slot = j * self.block_k + jnp.arange(self.block_k, dtype=k_start.dtype)
        return in_interval(k_start, slot, k_end)

    def split_queries(self, x: jax.Array) -> jax.Array:
        """Cuts (B, T, H, D) to (M, X, query tiles, R, D), zeros after the end."""
        x = self.split_heads(x)
        x = x.reshape(*x.shape[:3], self.query_tiles, self.block_q, -1)
        x = x.swapaxes(2, 3)  # (M, X, tiles, G, block_q, D)
        return x.reshape(*x.shape[:3], self.group * self.block_q, -1)

    def join_queries(self, x: jax.Array) -> jax.Array:
        """Joins (M, X, query tiles, R, D) to (B, T, H, D)."""
        x = x.reshape(*x.shape[:3], self.group, self.block_q, -1).swapaxes(2, 3)
        return self.join_heads(x.reshape(*x.shape[:3], -1, x.shape[-1]))

    def split_columns(self, x: jax.Array) -> jax.Array:
        """Cuts (B, T, H, D) to (M, X, D, query tiles, R), zeros after the end."""
        x = _pad(x, 1, self.query_tiles * self.block_q).transpose(0, 2, 3, 1)
        tiles = self.group, x.shape[2], self.query_tiles, self.block_q
        x = x.reshape(self.bound_rows, -1, *tiles)
        x = jnp.moveaxis(x, 2, 4)  # (M, X, D, tiles, G, block_q)
        return x.reshape(*x.shape[:4], -1)

    def join_columns(self, x: jax.Array) -> jax.Array:
        """Joins (M, X, D, query tiles, R) to (B, T, H, D)."""
        x = x.reshape(*x.shape[:4], self.group, self.block_q)
        x = jnp.moveaxis(x, 4, 2)  # (M, X, G, D, tiles, block_q)
        x = x.reshape(self.batch, self.kv_heads * self.group, x.shape[3], -1)
        return x.transpose(0, 3, 1, 2)[:, : self.length]

    def split_heads(self, x: jax.Array) -> jax.Array:
        """Cuts (B, T, H, D) to (M, X, G, query tiles * block_q, D), padded with zeros.

        Rows are not stacked yet, so that nothing moves if heads come first in memory.
        """
        x = _pad(x, 1, self.query_tiles * self.block_q).transpose(0, 2, 1, 3)
        return x.reshape(self.bound_rows, -1, self.group, *x.shape[2:])

    def join_heads(self, x: jax.Array) -> jax.Array:
        """Joins (M, X, G, query tiles * block_q, D) to (B, T, H, D)."""
        x = x.reshape(self.batch, -1, *x.shape[3:])
        return x.transpose(0, 2, 1, 3)[:, : self.length]

    def split_rows(self, x: jax.Array) -> jax.Array:
        """Cuts (B, H, T) to (M, X, query tiles, R)."""
        return self.split_queries(x.transpose(0, 2, 1)[..., None])[..., 0]

    def join_rows(self, x: jax.Array) -> jax.Array:
        """Joins (M, X, query tiles, R) to (B, H, T)."""
        return self.join_queries(x[..., None])[..., 0].transpose(0, 2, 1)

    def split_keys(self, x: jax.Array) -> jax.Array:
        """Cuts (B, S, K, D) to (M, X, key tiles, block_k, D), zeros after the end."""
        # No bound reaches the zeros: a tile that holds some is never full, so masked.
        x = _pad(x, 1, self.key_tiles * self.block_k).transpose(0, 2, 1, 3)
        tiles = self.key_tiles, self.block_k, x.shape[-1]
        return x.reshape(self.bound_rows, -1, *tiles)

    def join_keys(self, x: jax.Array) -> jax.Array:
        """Joins (M, X, key tiles, block_k, D) to (B, S, K, D)."""
        x = x.reshape(self.batch, self.kv_heads, -1, x.shape[-1])
        return x.transpose(0, 2, 1, 3)[:, : self.keys]

    def split_bounds(self, bound: jax.Array) -> jax.Array:
        """Cuts (M, T) to (M, query tiles, R), the bounds of the stacked rows."""
        # Rows after the end get [0, 0), and see nothing.
        bound = _pad(bound, 1, self.query_tiles * self.block_q)
        bound = bound.reshape(self.bound_rows, self.query_tiles, self.block_q)
        return jnp.tile(bound, (1, 1, self.group))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["numbers"], meta_fields=["shape"]
)
@dataclass(frozen=True)
class Tiles:
    """Tiles (lines, tiles, …) of which a loop reads and writes one at a time.

    numbers: (lines * tiles, numbers of a tile). A CPU copies one long row twice as fast
      as many short ones.
    shape: of a line, (tiles, …).
    """

    numbers: jax.Array
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tiles: jax.Array) -> "Tiles":
        lines, length = tiles.shape[:2]
        return cls(tiles.reshape(lines * length, -1), tiles.shape[1:])

    def joined(self) -> jax.Array:
        """Returns (lines, tiles, …)."""
        return self.numbers.reshape(-1, *self.shape)

    def read(self, line: jax.Array, i: jax.Array) -> jax.Array:
        """Returns tile i of a line."""
        number = line * self.shape[0] + i
        tile = lax.dynamic_index_in_dim(self.numbers, number)
        # Without the barrier XLA copies it in its shape all the same.
        return lax.optimization_barrier(tile).reshape(self.shape[1:])

    def write(self, line: jax.Array, i: jax.Array, tile: jax.Array) -> "Tiles":
        """Returns the tiles with another one as tile i of a line."""
        number = line * self.shape[0] + i
        row = tile.reshape(-1)
        numbers = lax.dynamic_update_index_in_dim(self.numbers, row, number, 0)
        return Tiles(numbers, self.shape)


def _pad(x: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)
