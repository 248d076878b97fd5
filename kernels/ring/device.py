"""Ring: what a device of a ring knows of it, and how it sends arrays around."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout as memory_layout

from ..backends import Backend
from ..device import is_cpu, is_tpu
from ..layouts import Array, Layout
from ..masks import Visible
from .schedule import ONE_WAY, Route, Walk

LANES = 128
"""A TPU's memory pads the last dimension of arrays to a multiple of this."""

HEADS_FIRST = 0, 2, 1, 3
"""Order of axes (B, L, H, D) as (B, H, L, D)."""

TOKENS_LAST = 0, 2, 3, 1
"""Of the same as (B, H, D, L), in which dq is summed."""

TOKENS_SECOND = 0, 3, 1, 2
"""Of that as (B, L, H, D) again."""

Pair = tuple[jax.Array, jax.Array]
Bounds = tuple[Array, Array]


@dataclass(frozen=True)
class Ring:
    """Static parameters of a ring.

    axis_name: mesh axis around which keys and values travel, or axes that make up one
      ring; None for a ring of one.
    size: devices in the ring.
    layout: which indices a shard holds.
    scale: factor on the scores.
    backend: the attention step (see `backends`).
    soft_cap: scores s become soft_cap · tanh(s / soft_cap), if given.
    keep_tail: as in `ring_attention.make_ring_attention`.
    takes_turns: whether the backward pass computes in turns (see above), as it should
      where a backend adds to dk and dv in place. If not given, it does on TPUs, and
      takes the way of CPUs there (see above).
    route: ways that keys and values take, and how far.
    """

    axis_name: str | tuple[str, ...] | None
    size: int
    layout: Layout
    scale: float
    backend: Backend
    soft_cap: float | None = None
    keep_tail: bool = False
    takes_turns: bool | None = None
    route: Route = ONE_WAY

    @property
    def scores(self) -> dict[str, float | None]:
        """Returns the backends' arguments of what becomes of q · k."""
        return {"scale": self.scale, "soft_cap": self.soft_cap}

    def shard(self) -> jax.Array | int:
        """Returns the number of the shard that this device's queries belong to."""
        return lax.axis_index(self.axis_name) if self.size > 1 else 0

    def slots(self, shard: jax.Array | int, visible: Visible, length: int) -> Bounds:
        """Returns the interval [k_start, k_end) of visible slots of a shard."""
        k_start = self.layout.count(shard, visible.k_start, self.size, length)
        k_end = self.layout.count(shard, visible.k_end, self.size, length)
        return k_start, k_end  # as visible, (B or 1, L)

    def source(self, walk: Walk, hops: jax.Array | int) -> jax.Array | int:
        """Returns whose piece is here after a number of hops of a walk."""
        shard = self.shard()
        if walk.stride:
            return (shard - walk.stride * hops) % self.size
        if isinstance(hops, int):
            return jnp.asarray(walk.sources(hops))[shard]
        place = jnp.asarray(walk.places)[shard]
        return jnp.asarray(walk.devices, jnp.int32)[(place - hops) % walk.length]

    def hop(self, arrays: Any, walk: Walk, hops: int = 1) -> Any:
        """Sends the arrays a number of devices further along a walk."""
        arrays = _ordered(arrays, HEADS_FIRST)
        arrays = lax.ppermute(arrays, self.axis_name, walk.pairs(hops))
        return _ordered(arrays, HEADS_FIRST)

    def count(self, visible: Visible, length: int) -> jax.Array:
        """Counts the steps after which no device reads a shard that has not come yet.

        The same number on all devices of the ring, and of those beside it.
        length: of a shard.
        """
        shards = jnp.arange(self.size, dtype=jnp.int32)
        bounds = self.slots(shards[:, None, None], visible, length)  # (N, B or 1, L)
        is_read = jnp.any(jnp.less(*bounds), axis=(1, 2))
        hops = (self.shard() - shards) % self.size
        if self.route.counts_both_ways:
            hops = jnp.minimum(hops, self.size - hops)
        ring = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        most = jnp.max(jnp.where(is_read, hops, 0))
        return lax.pmax(most, (*(ring or ()), *self.route.beside))

    def barrier(self, arrays: Any, dq: Any = None) -> tuple[Any, Any]:
        """Returns both as they are, once all of them are computed."""
        held = _ordered(arrays, HEADS_FIRST), _ordered(dq, TOKENS_LAST)
        arrays, dq = lax.optimization_barrier(held)
        return _ordered(arrays, HEADS_FIRST), _ordered(dq, TOKENS_SECOND)

    def as_read(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as a TPU's kernels read it: (B, H, L, D) in memory.

        D is padded to a multiple of 128, which it takes in a TPU's memory anyway. An
        array sent like this arrives like this; otherwise each ring step would transpose
        and pad it. On other devices, and in a ring of one, x is returned unchanged.
        """
        if self.size == 1 or not is_tpu():
            return x
        return self.heads_first(
            jnp.pad(x, ((0, 0),) * 3 + ((0, -x.shape[-1] % LANES),))
        )

    def heads_first(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as (B, H, L, D) in a TPU's memory.

        Kernels may leave results as (B, H, D, L). What is made of them must not ask
        for queries like that, which would be copied before each ring.
        """
        if self.size == 1 or not is_tpu():
            return x
        layout = memory_layout.Layout(major_to_minor=(0, 2, 1, 3))
        return memory_layout.with_layout_constraint(x, layout)


def _ordered(arrays: Any, order: tuple[int, ...]) -> Any:
    """Reorders the axes of arrays (B, L, H, D) for a CPU, and of those only.

    Elsewhere XLA orders in memory what travels as the kernels read it. On a CPU, the
    memory of what is sent, or waits at a barrier, is in the order of its axes: without
    another one each ring step would transpose what it reads and what it returns.
    """
    if not is_cpu():
        return arrays
    return jax.tree.map(lambda x: x.transpose(order) if x.ndim == 4 else x, arrays)
