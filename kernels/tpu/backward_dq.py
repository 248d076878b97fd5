"""Where the TPU backward kernel adds up dq: in vector memory, or through it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from .tile import StackedTiles, copies_in, copies_out, start_all, wait_for_all

STREAMED = 3
"""Buffers of a dq that moves: one arrives, one is added to, one leaves."""


class Resident(NamedTuple):
    """A dq that stays in VMEM from the first key tile of a head to the last."""

    buffer: jax.Ref  # (query tiles, R, D)
    source: StackedTiles
    target: StackedTiles
    semaphores: jax.Ref

    def open(self) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _():
            self._move(functools.partial(copies_in, self.source), 0)

    def start(self, i: jax.Array, begin: jax.Array) -> None:
        pass

    def wait(self, i: jax.Array) -> jax.Ref:
        return self.buffer.at[i]

    def put(self, i: jax.Array) -> None:
        pass

    def close(self, begin: jax.Array, end: jax.Array) -> None:
        @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
        def _():
            self._move(functools.partial(copies_out, self.target), 1)

    def _move(self, copies: Callable[..., list], direction: int) -> None:
        """Starts copies of all tiles, and waits for them."""
        semaphore = self.semaphores.at[direction, 0]

        @pl.loop(0, self.buffer.shape[0])
        def _(i):
            start_all(copies(i, self.buffer.at[i], semaphore))

        @pl.loop(0, self.buffer.shape[0])
        def _(i):
            wait_for_all(copies(i, self.buffer.at[i], semaphore))


class Streamed(NamedTuple):
    """A dq in HBM, of which the tile at work is in VMEM."""

    buffer: jax.Ref  # (STREAMED, R, D)
    source: StackedTiles  # the same memory as the target
    target: StackedTiles
    semaphores: jax.Ref  # (2, STREAMED)

    def open(self) -> None:
        pass

    def start(self, i: jax.Array, begin: jax.Array) -> None:
        """Starts to fetch a tile, once its buffer is free again."""

        @pl.when(i - STREAMED >= begin)
        def _():
            wait_for_all(self._leaving(i - STREAMED))

        start_all(self._arriving(i))

    def wait(self, i: jax.Array) -> jax.Ref:
        wait_for_all(self._arriving(i))
        return self.buffer.at[i % STREAMED]

    def put(self, i: jax.Array) -> None:
        start_all(self._leaving(i))

    def close(self, begin: jax.Array, end: jax.Array) -> None:
        """Waits for all that is on its way: the next key tile fetches it again."""

        @pl.loop(jnp.maximum(begin, end - STREAMED), end)
        def _(i):
            wait_for_all(self._leaving(i))

    def _arriving(self, i: jax.Array) -> list:
        slot = i % STREAMED
        # From the target, which the operand lies in: what was put must be seen again.
        buffer = self.buffer.at[slot]
        return copies_in(self.target, i, buffer, self.semaphores.at[0, slot])

    def _leaving(self, i: jax.Array) -> list:
        slot = i % STREAMED
        buffer = self.buffer.at[slot]
        return copies_out(self.target, i, buffer, self.semaphores.at[1, slot])
