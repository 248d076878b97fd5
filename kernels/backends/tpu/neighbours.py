"""Live tiles of a program of the TPU kernels, and of those before and after it.

Programs of a head run one after the other on a core: the last iteration of one starts
the copies for the first iteration of the next.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ..tile_ranges import TileRanges


class LiveTiles(NamedTuple):
    """The live tiles [begin, end) of a program."""

    begin: jax.Array
    end: jax.Array

    @property
    def is_live(self) -> jax.Array:
        return self.begin < self.end


class Neighbours(NamedTuple):
    """Live tiles of a program, and of those before and after it in its head.

    Neither begin nor end decreases from one to the next: the programs that visit some
    tile are consecutive.
    """

    before: LiveTiles
    here: LiveTiles
    after: LiveTiles

    @classmethod
    def of(cls, ranges: TileRanges, first: jax.Array) -> "Neighbours":
        """Reads those of this program. first: the number of the head's first one."""
        j, last = pl.program_id(2), pl.num_programs(2) - 1

        def live(j: jax.Array) -> LiveTiles:
            return LiveTiles(ranges.live_begin[first + j], ranges.live_end[first + j])

        before, here, after = (
            live(near) for near in (jnp.maximum(j - 1, 0), j, jnp.minimum(j + 1, last))
        )
        # Nothing is live before the first or after the last.
        return cls(
            before._replace(end=jnp.where(j == 0, before.begin, before.end)),
            here,
            after._replace(begin=jnp.where(j == last, after.end, after.begin)),
        )
