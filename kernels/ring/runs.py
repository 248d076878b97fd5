"""Runs of consecutive tokens on a ring's devices, and what is handed from run to run.

A shard is one run in a contiguous layout, two in zigzag, and a run for each stripe.
The n-th runs of all devices follow each other in an order of the devices, a walk:
zigzag's first runs ascend, its second ones descend. What depends on all tokens before
goes along the walks: the last tokens of a run to the next one, and affine maps of a
state, which are composed in the order of the tokens' indices.
"""

import math
from dataclasses import dataclass
from itertools import groupby, pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..layouts import Layout, order
from ..precision import product


@dataclass(frozen=True)
class Runs:
    """Runs of equal length, as many on every device.

    axis_name: mesh axes whose devices hold the sequence, in order.
    length: tokens of a run. walks: the devices' order, of each device's n-th runs.

    Arrays below are (B, runs, …), a device's runs in their order.
    """

    axis_name: tuple[str, ...]
    length: int
    walks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        ring_size: int,
        tokens: int,
        slices: int = 1,
        axis_name: tuple[str, ...] = ("ring",),
    ) -> "Runs":
        """Returns the runs of a sequence's shards, each in as many slices.

        Raises:
          ValueError: the sequence does not divide, or the n-th runs of all devices do
            not come before all later ones.
        """
        devices = ring_size * slices
        index = order(layout, ring_size, tokens).reshape(devices, -1)
        ends = np.flatnonzero((np.diff(index) != 1).any(axis=0)) + 1
        length = math.gcd(index.shape[1], *ends.tolist())
        starts = index[:, ::length]  # (devices, runs)
        if (starts.max(axis=0)[:-1] > starts.min(axis=0)[1:]).any():
            raise ValueError(
                f"{layout} in {slices} slices a shard has runs of tokens that do not "
                "follow each other device by device: set mesh.ulysses=1, or choose "
                "attention=zigzag"
            )
        walks = tuple(map(tuple, np.argsort(starts, axis=0).T.tolist()))
        return cls(axis_name, length, walks)

    @property
    def devices(self) -> int:
        return len(self.walks[0])

    def cut(self, x: jax.Array) -> jax.Array:
        """Cuts a device's tokens (B, L, …) into runs (B, runs, length, …)."""
        return x.reshape(x.shape[0], len(self.walks), self.length, *x.shape[2:])

    def handed_on(self, x: jax.Array) -> jax.Array:
        """Returns what the run before each has in x; zeros for the first of all."""
        if self.devices == 1:
            return jnp.zeros_like(x)
        got = self._moved(x, 1)
        if len(self.walks) > 1:
            ends = [(a[-1], b[0]) for a, b in pairwise(self.walks)]
            sent = [
                x[:, n] if a == b else lax.ppermute(x[:, n], self.axis_name, [(a, b)])
                for n, (a, b) in enumerate(ends)
            ]
            firsts = jnp.array([b for _, b in ends])  # (runs - 1,)
            is_there = (firsts == self._device()).reshape(-1, *[1] * (x.ndim - 2))
            later = jnp.where(is_there, jnp.stack(sent, axis=1), got[:, 1:])
            got = jnp.concatenate([got[:, :1], later], axis=1)
        return got

    def states(self, maps: jax.Array, with_last: bool) -> tuple[jax.Array, jax.Array]:
        """Returns the states before each run, (B, runs, H, D, V) from zeros, and after.

        maps: (B, runs, H, D, V + D) float32, of S -> A S + B: B, and then A. Composed
        along each walk in a logarithmic number of steps.
        with_last: whether the state after the last run is wanted; else it is any.
        """
        depth = maps.shape[-2]
        values = maps.shape[-1] - depth
        identity = jnp.eye(depth, values + depth, values, maps.dtype)
        before = self._composed(maps, identity)
        state = jnp.zeros_like(maps[:, 0, ..., :values])
        starts = [state]
        last = len(self.walks) - (not with_last)
        if last:
            # What all runs of a walk make of the state before them, for all devices.
            ends = jnp.array([walk[-1] for walk in self.walks[:last]])
            is_end = (ends == self._device())[:, None, None, None]
            whole = jnp.where(is_end, after(maps[:, :last], before[:, :last]), 0)
            whole = lax.psum(whole, self.axis_name)
            for n in range(last):
                starts.append(after(whole[:, n], starts[-1]))
        *starts, state = starts if with_last else [*starts, state]
        return after(before, jnp.stack(starts, axis=1)), state

    def _composed(self, maps: jax.Array, identity: jax.Array) -> jax.Array:
        """Returns the map of all runs before each in its walk."""
        places = jnp.array([np.argsort(walk) for walk in self.walks])
        place = places[:, self._device(), None, None, None]  # (runs, 1, 1, 1)
        x = jnp.where(place > 0, self._moved(maps, 1), identity)
        for doubling in range((self.devices - 2).bit_length()):
            got = self._moved(x, 1 << doubling)
            x = jnp.where(place >> doubling > 0, after(x, got), x)
        return x

    def _moved(self, x: jax.Array, steps: int) -> jax.Array:
        """Sends x as many steps along the walks; the first devices get zeros."""
        parts, first = [], 0
        for walk, alike in groupby(self.walks):
            stop = first + len(list(alike))
            pairs = list(zip(walk[:-steps], walk[steps:], strict=True))
            parts.append(lax.ppermute(x[:, first:stop], self.axis_name, pairs))
            first = stop
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def _device(self) -> jax.Array:
        return lax.axis_index(self.axis_name)


def after(one: jax.Array, earlier: jax.Array) -> jax.Array:
    """Applies an affine map to states, or to the columns of an earlier map.

    one: (…, D, V + D). earlier: states (…, D, V), or a map (…, D, V + D).
    """
    depth = one.shape[-2]
    values = one.shape[-1] - depth
    found = product("...de,...ew->...dw", one[..., values:], earlier)
    widths = [(0, 0)] * (one.ndim - 1) + [(0, earlier.shape[-1] - values)]
    return found + jnp.pad(one[..., :values], widths)
