"""Runs of consecutive tokens on a ring's devices, and what is handed from run to run.

A shard is one run in a contiguous layout, two in zigzag and mirror, and a run for each
stripe. What depends on all tokens before goes along the runs in the order of their
tokens: the last tokens of a run to the next one, and affine maps of a state, which are
composed.
"""

import functools
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..layouts import Layout, order
from ..precision import product
from .rule import after

SAVED = "delta_saved"
"""Name of what a backward needs in order to send nothing again: see models/memory."""


class Move(NamedTuple):
    """A transfer: senders and receivers, and slots of the former and of the latter."""

    devices: list[tuple[int, int]]
    source: slice
    target: slice

    def ends_at(self, source: slice, target: slice) -> bool:
        """Returns whether these slots follow its own, at both ends."""
        return (self.source.stop, self.target.stop) == (source.start, target.start)


@dataclass(frozen=True)
class Runs:
    """Runs of equal length, as many on every device.

    axis_name: mesh axes whose devices hold the sequence, in order.
    length: tokens of a run. slots: runs of a device.
    owners: device and slot of each run, in the order of their tokens.

    Arrays below are (B, slots, …).
    """

    axis_name: tuple[str, ...]
    length: int
    slots: int
    owners: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls,
        layout: Layout,
        devices: int,
        tokens: int,
        slices: int = 1,
        axes: tuple = (),
    ) -> "Runs":
        """Returns the runs of a ring's shards, each in as many slices, on mesh axes."""
        index = order(layout, devices, tokens).reshape(devices * slices, -1)
        # Cut where the tokens of any device jump: all have runs of the same slots.
        ends = np.flatnonzero((np.diff(index) != 1).any(axis=0)) + 1
        length = math.gcd(index.shape[1], *ends.tolist())
        starts = index[:, ::length]  # (devices, slots)
        slots = starts.shape[1]
        in_order = np.argsort(starts, axis=None).tolist()
        return cls(axes, length, slots, tuple(divmod(run, slots) for run in in_order))

    @property
    def devices(self) -> int:
        return len(self.owners) // self.slots

    @property
    def shifts(self) -> list[int]:
        """Returns by how many runs maps move: 1, and then 1, 2, 4, … to double them."""
        if self.devices == 1:
            return []
        return [1, *(1 << n for n in range((len(self.owners) - 2).bit_length()))]

    def cut(self, x: jax.Array) -> jax.Array:
        """Cuts a device's tokens (B, L, …) into runs (B, slots, length, …)."""
        return x.reshape(x.shape[0], self.slots, self.length, *x.shape[2:])

    def moved(self, x: jax.Array, steps: int = 1) -> jax.Array:
        """Returns for each run what the one `steps` before it has in x, or zeros."""
        out = jnp.zeros_like(x)
        for pairs, source, target in self.moves(steps):
            # Zeros on devices without a partner: each slot is received once, if at all,
            # so that a sum joins the transfers.
            part = lax.ppermute(x[:, source], self.axis_name, pairs)
            around = target.start, self.slots - target.stop
            out += jnp.pad(part, [(0, 0), around, *[(0, 0)] * (x.ndim - 2)])
        return out

    def moves(self, steps: int) -> list[Move]:
        """Returns the transfers that hand each run's arrays to the run `steps` later.

        A transfer takes neighbouring slots alone: a slice over others would hand on the
        slots between them too, which are added to those of other runs.
        """
        later = self.owners[steps:]
        pairs = defaultdict(list)
        for (a, source), (b, target) in zip(self.owners, later, strict=False):
            pairs[target - source, source].append((a, b))
        moves: list[Move] = []
        for (shift, first), devices in sorted(pairs.items()):
            source = slice(first, first + 1)
            target = slice(first + shift, first + shift + 1)
            last = moves[-1] if moves else None
            if last and last.devices == devices and last.ends_at(source, target):
                source = slice(last.source.start, source.stop)
                target = slice(last.target.start, target.stop)
                moves.pop()
            moves.append(Move(devices, source, target))
        return moves

    def states(self, maps: jax.Array) -> jax.Array:
        """Returns the states before each run, (B, slots, H, D, V); the first is zero.

        Maps are composed in a logarithmic number of steps.

        maps: (B, slots, H, D, V + D) float32, of S -> A S + B: B, and then A.
        """
        return _states_before(self, maps)

    def _composed(self, maps: jax.Array) -> jax.Array:
        """Computes the same; its gradient would keep the maps of every step."""
        depth, width = maps.shape[-2:]
        values = width - depth
        rank = self._rank()
        # The map of the run before; the identity for the first run.
        before = jnp.eye(depth, width, values, maps.dtype)
        before = jnp.where(rank > 0, self.moved(maps), before)
        for steps in self.shifts[1:]:
            composed = after(before, self.moved(before, steps))
            # A run with fewer than `steps` before it has the whole map already.
            before = jnp.where(rank >= steps, composed, before)
        # The state before all runs is zero: of a map S -> A S + B, that leaves B.
        return before[..., :values]

    def last(self, states: jax.Array) -> jax.Array:
        """Selects the state after the last run of all, (B, H, D, V), on all devices."""
        is_last = self._rank() == len(self.owners) - 1
        return lax.psum(jnp.where(is_last, states, 0).sum(axis=1), self.axis_name)

    def _rank(self) -> jax.Array:
        """Returns the numbers of the device's runs among all: (slots, 1, 1, 1)."""
        ranks = np.argsort([a * self.slots + b for a, b in self.owners])
        ranks = jnp.array(ranks.reshape(-1, self.slots, 1, 1, 1))
        return ranks[lax.axis_index(self.axis_name)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _states_before(runs: Runs, maps: jax.Array) -> jax.Array:
    """Returns `Runs.states`, whose gradient goes back along the runs."""
    return _states_before_forward(runs, maps)[0]


def _states_before_forward(runs: Runs, maps: jax.Array) -> tuple:
    # Named, so that a remat policy can save it: then the backward sends no maps twice.
    states = checkpoint_name(runs._composed(maps), SAVED)
    return states, (maps, states)


def _states_before_backward(runs: Runs, residuals: tuple, d_states: jax.Array) -> tuple:
    maps, states = residuals
    values = states.shape[-1]
    # Of S' = A S + B, dS = A^T dS' + what S itself is read for: an affine map too, of
    # what comes from the runs behind.
    linear = jnp.swapaxes(maps[..., values:], -1, -2)  # (B, slots, H, D, D)
    back = jnp.concatenate([d_states, linear], axis=-1)
    d_after = replace(runs, owners=runs.owners[::-1])._composed(back)
    d_linear = product("...dv,...ev->...de", d_after, states)
    return (jnp.concatenate([d_after, d_linear], axis=-1),)


_states_before.defvjp(_states_before_forward, _states_before_backward)
