"""Accumulates dQ in the TPU backward kernel: in VMEM, or streamed through it.

A visit is an iteration of the kernel: a key tile with a query tile. Visits of a head
form chains, also from one key tile to the next: in each visit of a chain, the copies
for the next one are started. Visit n of a chain has dQ

    Resident    HBM -> VMEM              during visit n - 1, if it is the tile's first
                added to                 in visit n
                VMEM -> HBM              from visit n on, if it is the tile's last
    Streamed    HBM -> buffer n % 3      during visit n - 1
                added to                 in visit n
                buffer n % 3 -> HBM      during visit n + 1

HBM holds the sum so far, in place: a tile without a visit stays there as it is.

Both have the same methods. `chains` decides where chains go on. For each visit the
kernel calls `prefetch` (in the visit before), `wait` and `store`; for each key tile,
`end`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .bounds import LiveTiles, Neighbours
from .dma import StackedTiles, copies, start_all, wait_all

STREAMED = 3
"""Buffers of a streamed dQ: one arrives, one is added to, one leaves."""

VISITED, STORED = 0, 1
"""Indices in SMEM: visits of the chain so far; tiles of the head on their way out."""


@dataclass(frozen=True)
class Accumulator:
    """dQ of a head, and its copies."""

    near: Neighbours
    buffer: jax.Ref  # [query tiles or STREAMED, R, D], or the last two swapped
    source: StackedTiles  # the same memory as the target
    target: StackedTiles
    semaphores: jax.Ref  # [in and out, STREAMED]
    counts: jax.Ref  # [2], SMEM: at VISITED and STORED


class Resident(Accumulator):
    """dQ that stays in VMEM from a tile's first visit to the end of its head."""

    @staticmethod
    def chains(first: LiveTiles, second: LiveTiles) -> jax.Array:
        """Returns whether a key tile's last visit prefetches the next one's first."""
        return first.is_live & second.is_live

    def prefetch(self, i: jax.Array, n: jax.Array, is_first: jax.Array) -> None:
        """Starts to read tile i if visit n is its first one."""
        pl.when(is_first)(lambda: start_all(self._incoming(i, n)))

    def wait(self, i: jax.Array, n: jax.Array) -> jax.Ref:
        """Drains what `prefetch(i, n)` started; returns tile i, [R, D]."""
        # Ends do not decrease: no key tile before has seen query tiles from there on.
        is_first = i >= self.near.before.end
        pl.when(is_first)(lambda: wait_all(self._incoming(i, n)))
        return self.buffer.at[i]

    def store(self, i: jax.Array, n: jax.Array) -> None:
        """Starts to write tile i after its last visit; drained by the last `end`."""
        # Begins do not decrease: no later key tile sees query tiles before that one.
        is_last = i < self.near.after.begin
        pl.when(is_last)(lambda: start_all(self._outgoing(i)))

    def end(self, visits: jax.Array) -> None:
        """Drains the stores of all tiles, at the last key tile of a head."""
        j = pl.program_id(2)
        begin, end = self.near.here
        # Of the head's key tiles before: SMEM keeps the count from program to program,
        # and from head to head.
        before = jnp.where(j == 0, 0, self.counts[STORED])
        stored = before + jnp.minimum(end, self.near.after.begin) - begin
        self.counts[STORED] = stored

        @pl.when(j == pl.num_programs(2) - 1)
        def _():
            # A wait drains the bytes of a tile, of whichever: all have the same size.
            pl.loop(0, stored)(lambda _: wait_all(self._outgoing(0)))

    def _incoming(self, i: jax.Array, n: jax.Array) -> list:
        # Tiles of two visits at most are on their way in: one waited for, one started.
        return copies(self.source, i, self.buffer.at[i], self.semaphores.at[0, n & 1])

    def _outgoing(self, i: jax.Array) -> list:
        # One for all tiles: nobody waits for a certain one.
        semaphore = self.semaphores.at[1, 0]
        return copies(self.target, i, self.buffer.at[i], semaphore, is_out=True)


class Streamed(Accumulator):
    """dQ in HBM, of which one tile at a time is added to in VMEM."""

    @staticmethod
    def chains(first: LiveTiles, second: LiveTiles) -> jax.Array:
        """Returns whether a key tile's last visit prefetches the next one's first.

        Not if that tile is one of the first's last two: it may not have been written.
        """
        is_written = second.begin + STREAMED <= first.end
        is_new = second.begin >= first.end
        return Resident.chains(first, second) & (is_written | is_new)

    def prefetch(self, i: jax.Array, n: jax.Array, is_first: jax.Array) -> None:
        """Starts to read tile i for visit n."""
        # The buffer is free once what visit n - 3 stored has left it.
        pl.when(n >= STREAMED)(lambda: wait_all(self._outgoing(i, n)))
        start_all(self._incoming(i, n))

    def wait(self, i: jax.Array, n: jax.Array) -> jax.Ref:
        """Drains what `prefetch(i, n)` started; returns tile i, [R, D]."""
        wait_all(self._incoming(i, n))
        return self.buffer.at[lax.rem(n, STREAMED)]

    def store(self, i: jax.Array, n: jax.Array) -> None:
        """Starts to write tile i; drained by the prefetch of visit n + 3, or `end`."""
        start_all(self._outgoing(i, n))

    def end(self, visits: jax.Array) -> None:
        """Drains the last three stores of a chain, if it ends here.

        The next key tile may read these tiles again. visits: of the chain.
        """

        @pl.when(~self.chains(self.near.here, self.near.after))
        def _():
            @pl.loop(jnp.maximum(visits - STREAMED, 0), visits)
            def _(n):
                wait_all(self._outgoing(0, n))  # of that size, whichever tile it was

    def _incoming(self, i: jax.Array, n: jax.Array) -> list:
        slot = lax.rem(n, STREAMED)
        buffer = self.buffer.at[slot]
        # From the target, which aliases the source: earlier key tiles have added to it.
        return copies(self.target, i, buffer, self.semaphores.at[0, slot])

    def _outgoing(self, i: jax.Array, n: jax.Array) -> list:
        slot = lax.rem(n, STREAMED)
        buffer = self.buffer.at[slot]
        semaphore = self.semaphores.at[1, slot]
        return copies(self.target, i, buffer, semaphore, is_out=True)
