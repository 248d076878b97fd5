"""The parameters of a ring on each of its devices, and how these send and wait."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import layout as memory_layout

from ..backends import Backend
from ..devices.device import is_cpu, is_tpu
from ..layouts import Layout
from ..masks import Visible
from ..placement import varying_over
from ..precision import Scores
from .routes import ONE_WAY, Counted, Route

LANES = 128
"""A TPU's memory pads the last dimension of arrays to a multiple of this."""

HEADS_FIRST = 0, 2, 1, 3
"""Order of axes, (B, L, H, D) -> (B, H, L, D), and back."""

TOKENS_LAST = 0, 2, 3, 1
"""(B, L, H, D) -> (B, H, D, L), in which `blockwise` sums up dq."""

TOKENS_SECOND = 0, 3, 1, 2
"""(B, H, D, L) -> (B, L, H, D)."""


@dataclass(frozen=True)
class Ring:
    """Static parameters of a ring.

    axis_name: mesh axis around which keys and values travel, or axes that make up one
      ring; None for a ring of one.
    size: devices in the ring.
    layout: which indices a shard holds.
    scale: factor on the scores.
    backend: whose kernels attend (see `backends`).
    soft_cap: scores s become soft_cap · tanh(s / soft_cap), if given.
    route: ways that keys and values take, and how far.
    natural_order: whether operands and results are slices of the sequence in natural
      order, and not shards of the layout (see `natural`).
    """

    axis_name: str | tuple[str, ...] | None
    size: int
    layout: Layout
    scale: float
    backend: Backend
    soft_cap: float | None = None
    route: Route = ONE_WAY
    natural_order: bool = False

    @property
    def scores(self) -> Scores:
        return Scores(self.scale, self.soft_cap)

    def shard(self) -> jax.Array | int:
        """Returns the number of the shard that this device's queries belong to."""
        return lax.axis_index(self.axis_name) if self.size > 1 else 0

    def slots(self, shard: jax.Array | int, visible: Visible, length: int) -> Visible:
        """Returns the intervals of visible slots of a shard, as visible (m, B or 1, L).

        shard: broadcasts against the bounds. length: slots of a shard.
        """
        return Visible(
            self.layout.count(shard, visible.k_start, self.size, length),
            self.layout.count(shard, visible.k_end, self.size, length),
        )

    def shift(self, arrays: Any, shifts: int) -> Any:
        """Sends the arrays a number of devices on, or back if it is below 0."""
        # All devices receive: one that is in no pair would get zeros, and no error.
        pairs = [(device, (device + shifts) % self.size) for device in range(self.size)]
        arrays = lax.ppermute(_ordered(arrays, HEADS_FIRST), self.axis_name, pairs)
        return _ordered(arrays, HEADS_FIRST)

    def count_steps(self, visible: Visible, length: int) -> jax.Array | None:
        """Counts the ring steps until every device has had each shard that it reads.

        The same number on all devices of the ring, and of the other axes; None for a
        route whose steps are known. length: slots of a shard.
        """
        if self.size == 1 or not isinstance(self.route, Counted):
            return None
        shards = jnp.arange(self.size, dtype=jnp.int32)
        bounds = self.slots(shards[:, None, None, None], visible, length)
        is_read = jnp.any(bounds.k_start < bounds.k_end, axis=(1, 2, 3))  # (N,)
        shifts = (self.shard() - shards) % self.size  # (N,)
        if self.route.both_ways:
            shifts = jnp.minimum(shifts, self.size - shifts)
        ring = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        axes = (*(ring or ()), *self.route.other_axes)
        most = jnp.max(jnp.where(is_read, shifts, 0))
        # Devices that left the loop at different steps would wait for each other.
        return lax.pmax(varying_over(axes, most), axes)

    def barrier(self, arrays: Any) -> Any:
        """Returns the arrays as they are, once all are computed or have arrived."""
        held = lax.optimization_barrier(_ordered(arrays, HEADS_FIRST))
        return _ordered(held, HEADS_FIRST)

    def barrier_with_dq(self, arrays: Any, dq: Any) -> tuple[Any, Any]:
        """Returns both as they are, once all are computed or have arrived."""
        held = lax.optimization_barrier(
            (_ordered(arrays, HEADS_FIRST), _ordered(dq, TOKENS_LAST))
        )
        return _ordered(held[0], HEADS_FIRST), _ordered(held[1], TOKENS_SECOND)

    def as_read(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as a TPU's kernels read it: (B, H, L, D) in memory.

        D is padded to a multiple of 128, which it takes in a TPU's memory anyway. An
        array sent like this arrives like this; otherwise each ring step would transpose
        and pad it. On other devices, and in a ring of one, x is returned unchanged.
        """
        if self.size == 1 or not is_tpu():
            return x
        lanes = -x.shape[-1] % LANES
        return self.heads_first(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, lanes))))

    def heads_first(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as (B, H, L, D) in a TPU's memory.

        Kernels may leave results as (B, H, D, L). XLA would ask for queries in that
        order too, and copy them before each ring.
        """
        if self.size == 1 or not is_tpu():
            return x
        layout = memory_layout.Layout(major_to_minor=HEADS_FIRST)
        return memory_layout.with_layout_constraint(x, layout)


def _ordered(arrays: Any, order: tuple[int, ...]) -> Any:
    """Reorders the axes of arrays (B, L, H, D) for a CPU, and of those only.

    Elsewhere XLA orders in memory what travels as the kernels read it. On a CPU, the
    memory of what is sent, or waits at a barrier, is in the order of its axes: in the
    order (B, L, H, D) each ring step would transpose what it reads and returns.
    """
    if not is_cpu():
        return arrays
    return jax.tree.map(lambda x: x.transpose(order) if x.ndim == 4 else x, arrays)
