"""Accumulates dQ in the TPU backward kernel: in VMEM, or streamed through it.

Both have the same five methods, which the kernel calls in this order: `begin`, and in
each iteration `prefetch` (of the next tile), `wait`, `store`; then `end`.

    Resident    HBM -> VMEM at the first key tile of a head, VMEM -> HBM at the last
    Streamed    tile i: HBM -> buffer i % 3   during iteration i - 1
                        added to              in iteration i
                        buffer i % 3 -> HBM   during iteration i + 1
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .dma import StackedTiles, copies_in, copies_out, start_all, wait_all

STREAMED = 3
"""Buffers of a streamed dQ: one arrives, one is added to, one leaves."""


class Resident(NamedTuple):
    """dQ that stays in VMEM from the first key tile of a head to the last."""

    buffer: jax.Ref  # [query tiles, R, D]
    source: StackedTiles
    target: StackedTiles
    semaphores: jax.Ref  # [in and out, STREAMED]

    def begin(self) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _():
            self._move(functools.partial(copies_in, self.source), 0)

    def prefetch(self, i: jax.Array, first: jax.Array) -> None:
        pass

    def wait(self, i: jax.Array) -> jax.Ref:
        """Returns tile i, [R, D]: nothing is on its way."""
        return self.buffer.at[i]

    def store(self, i: jax.Array) -> None:
        pass

    def end(self, first: jax.Array, end: jax.Array) -> None:
        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            self._move(functools.partial(copies_out, self.target), 1)

    def _move(self, copies: Callable[..., list], direction: int) -> None:
        """Starts the copies of all tiles, then drains them."""
        semaphore = self.semaphores.at[direction, 0]

        @pl.loop(0, self.buffer.shape[0])
        def _(i):
            start_all(copies(i, self.buffer.at[i], semaphore))

        @pl.loop(0, self.buffer.shape[0])
        def _(i):
            wait_all(copies(i, self.buffer.at[i], semaphore))


class Streamed(NamedTuple):
    """dQ in HBM, of which one tile at a time is added to in VMEM."""

    buffer: jax.Ref  # [STREAMED, R, D]
    source: StackedTiles  # the same memory as the target
    target: StackedTiles
    semaphores: jax.Ref  # [in and out, STREAMED]

    def begin(self) -> None:
        pass

    def prefetch(self, i: jax.Array, first: jax.Array) -> None:
        """Starts to read tile i. first: the first tile of the loop."""

        # The buffer is free once tile i - 3, stored two iterations ago, has left it.
        @pl.when(i - STREAMED >= first)
        def _():
            wait_all(self._outgoing(i - STREAMED))

        start_all(self._incoming(i))

    def wait(self, i: jax.Array) -> jax.Ref:
        """Drains what `prefetch(i)` started; returns tile i, [R, D]."""
        wait_all(self._incoming(i))
        return self.buffer.at[i % STREAMED]

    def store(self, i: jax.Array) -> None:
        """Starts to write tile i; drained by `prefetch(i + 3)`, or by `end`."""
        start_all(self._outgoing(i))

    def end(self, first: jax.Array, end: jax.Array) -> None:
        """Drains the last three stores: the next key tile reads these tiles again."""

        @pl.loop(jnp.maximum(first, end - STREAMED), end)
        def _(i):
            wait_all(self._outgoing(i))

    def _incoming(self, i: jax.Array) -> list:
        slot = i % STREAMED
        buffer = self.buffer.at[slot]
        # From the target, which aliases the source: earlier key tiles have added to it.
        return copies_in(self.target, i, buffer, self.semaphores.at[0, slot])

    def _outgoing(self, i: jax.Array) -> list:
        slot = i % STREAMED
        buffer = self.buffer.at[slot]
        return copies_out(self.target, i, buffer, self.semaphores.at[1, slot])
