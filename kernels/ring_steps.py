"""Steps of a ring: what a device computes in each, and what travels meanwhile.

In each step, keys and values are sent to the next device while those that have arrived
are attended to (Ring Attention, 2310.01889). In the backward pass dq stays, and dk and
dv follow their keys and values around the ring, and home:

    at once     keys of the next step, and dk, dv of the last one, travel during a step;
                what it computes is added to those that have arrived, in XLA
    in turns    the heads in two halves: while one is computed, and added in place to
                what has arrived, dk and dv of the other one travel

so that every transfer overlaps a kernel. Half of the local block's queries are deferred
to overlap the last transfer. On CPUs, which would wait in any case, dk and dv of each
step arrive before it, and it adds to them in place.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import layout as memory_layout

from .backends import Backend
from .device import is_cpu, is_tpu
from .layouts import Array, Layout
from .masks import Visible
from .merge import added

UNROLLED_STEPS = 16
"""Rings with more steps are compiled as a loop: its compile time does not grow."""

LOOP_UNROLL = 2
"""Ring steps in an iteration of that loop: keys alternate between two buffers, and are
not copied back into one."""

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
Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""q, do (B, L, H, D), lse and delta (B, H, L) of a device's queries."""


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
    takes_turns: whether the backward pass computes the heads in halves (see above), as
      it should where a backend adds to dk and dv in place. If not given, it does on
      TPUs, and takes the way of CPUs there (see above).
    """

    axis_name: str | tuple[str, ...] | None
    size: int
    layout: Layout
    scale: float
    backend: Backend
    soft_cap: float | None = None
    keep_tail: bool = False
    takes_turns: bool | None = None

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

    def rotate(self, arrays: Any) -> Any:
        """Sends the arrays to the next device of the ring."""
        neighbours = [(d, (d + 1) % self.size) for d in range(self.size)]
        arrays = lax.ppermute(_ordered(arrays, HEADS_FIRST), self.axis_name, neighbours)
        return _ordered(arrays, HEADS_FIRST)

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


def forward_steps(
    ring: Ring, q: jax.Array, kv: Pair, visible: Visible, length: int
) -> Pair:
    """Returns out (B, T, H, D) and lse (B, H, T) in float32. length: of a shard."""

    def compute(step, kv, carry):
        source = (ring.shard() - step) % ring.size
        bounds = ring.slots(source, visible, length)
        return ring.backend.forward(q, *kv, *bounds, **ring.scores, carry=carry)

    def step_and_rotate(step, kv, carry):
        arriving = ring.rotate(kv)
        carry = compute(step, kv, carry)
        # Without the barrier XLA may start all transfers at once, or late.
        return ring.barrier((arriving, carry))[0]

    if ring.size == 1:
        return compute(0, kv, None)
    state = step_and_rotate(0, kv, None)
    state = _loop(1, ring.size - 1, step_and_rotate, state)
    return compute(ring.size - 1, *state)


def backward_steps(
    ring: Ring, rows: Rows, kv: Pair, visible: Visible
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk and dv, float32; of dq and dk without the factor `scale`.

    visible: key indices [k_start, k_end) of each query.
    """
    length, kv_heads = kv[0].shape[1:3]

    def bounds(step):
        return ring.slots((ring.shard() - step) % ring.size, visible, length)

    if ring.size == 1:
        dq, (dk, dv) = _add_gradients(ring, rows, kv, bounds(0), _zeros(rows), None)
        return dq, dk, dv
    if ring.takes_turns is None and is_cpu():
        dq, (dk, dv) = _backward_in_place(ring, rows, kv, bounds)
        return dq, dk, dv
    takes_turns = is_tpu() if ring.takes_turns is None else ring.takes_turns
    if kv_heads == 1 or not takes_turns:
        dq, (dk, dv) = _backward_at_once(ring, rows, kv, bounds)
        return dq, dk, dv
    halves_of_heads = _cut_heads(rows, kv, kv_heads // 2)
    dq, dkv = _backward_in_turns(ring, *halves_of_heads, bounds)
    joined = (jnp.concatenate(x, axis=2) for x in (dq, *zip(*dkv, strict=True)))
    dq, dk, dv = map(ring.heads_first, joined)
    return dq, dk, dv


def _backward_at_once(ring: Ring, rows: Rows, kv: Pair, bounds: Callable):
    length = kv[0].shape[1]

    def step_and_rotate(step, kv, dq, dkv):
        # The gradients summed so far for these keys follow them, one step behind.
        arriving, dkv = ring.rotate(kv), ring.rotate(dkv)
        dq, partial = _add_gradients(ring, rows, kv, bounds(step), dq, None)
        (arriving, dkv, partial), dq = ring.barrier((arriving, dkv, partial), dq)
        return arriving, dq, added(dkv, partial)

    # The local block is computed in halves: the first half of the queries overlaps the
    # first transfer of keys, the second half the transfer of dk and dv to their owner.
    early, late = halves(bounds(0), length)
    arriving = ring.rotate(kv)
    dq, dkv = _add_gradients(ring, rows, kv, early, _zeros(rows), None)
    (arriving, dkv), dq = ring.barrier((arriving, dkv), dq)
    state = arriving, dq, dkv
    visiting, dq, dkv = _loop(1, ring.size - 1, step_and_rotate, state)
    last = bounds(ring.size - 1)
    for keys, seen in (visiting, last), (kv, late):
        dkv = ring.rotate(dkv)
        dq, partial = _add_gradients(ring, rows, keys, seen, dq, None)
        (dkv, partial), dq = ring.barrier((dkv, partial), dq)
        dkv = added(dkv, partial)
    return dq, dkv


def _backward_in_place(ring: Ring, rows: Rows, kv: Pair, bounds: Callable):
    """Does the same on CPUs: dk and dv travel with their keys."""

    def step_and_rotate(step, kv, dq, dkv):
        arriving = ring.rotate(kv)
        dq, dkv = _add_gradients(ring, rows, kv, bounds(step), dq, dkv)
        (arriving, dkv), dq = ring.barrier((arriving, dkv), dq)
        return arriving, dq, ring.rotate(dkv)

    state = step_and_rotate(0, kv, _zeros(rows), None)
    visiting, dq, dkv = _loop(1, ring.size - 1, step_and_rotate, state)
    last = bounds(ring.size - 1)
    dq, dkv = _add_gradients(ring, rows, visiting, last, dq, dkv)
    return dq, ring.rotate(dkv)


def _backward_in_turns(
    ring: Ring, rows: tuple[Rows, Rows], kv: tuple[Pair, Pair], bounds: Callable
):
    """Does the same with two halves of the heads: pairs of all that was one."""
    length = kv[0][0].shape[1]

    def turns(seen, kv, dq, dkv, sends_keys=False, is_last=False):
        # dk and dv of the first half are here. While it is computed, those of the
        # second travel; and each half's keys, which are needed in the next step.
        kv_one, kv_two = kv
        one, two = dkv
        two = two and ring.rotate(two)
        arriving_one = sends_keys and ring.rotate(kv_one)
        dq_one, one = _add_gradients(ring, rows[0], kv_one, seen, dq[0], one)
        two, kv_two, arriving_one, dq_one, one = lax.optimization_barrier(
            (two, kv_two, arriving_one, dq_one, one)
        )
        one = one if is_last else ring.rotate(one)
        arriving_two = sends_keys and ring.rotate(kv_two)
        dq_two, two = _add_gradients(ring, rows[1], kv_two, seen, dq[1], two)
        return lax.optimization_barrier(
            ((arriving_one, arriving_two), (dq_one, dq_two), (one, two))
        )

    def step_and_rotate(step, kv, dq, dkv):
        return turns(bounds(step), kv, dq, dkv, sends_keys=True)

    early, late = halves(bounds(0), length)
    zeros = tuple(map(_zeros, rows))
    state = turns(early, kv, zeros, (None, None), sends_keys=True)
    visiting, dq, dkv = _loop(1, ring.size - 1, step_and_rotate, state)
    _, dq, dkv = turns(bounds(ring.size - 1), visiting, dq, dkv)
    return turns(late, kv, dq, dkv, is_last=True)[1:]


def _add_gradients(
    ring: Ring, rows: Rows, kv: Pair, bounds: Bounds, dq: jax.Array, dkv: Pair | None
) -> tuple[jax.Array, Pair]:
    q, *others = rows
    options = {**ring.scores, "dq": dq, "dkv": dkv}
    dq, dk, dv = ring.backend.backward(q, *kv, *others, *bounds, **options)
    return dq, (dk, dv)


def _ordered(arrays: Any, order: tuple[int, ...]) -> Any:
    """Reorders the axes of arrays (B, L, H, D) for a CPU, and of those only.

    Elsewhere XLA orders in memory what travels as the kernels read it. On a CPU, the
    memory of what is sent, or waits at a barrier, is in the order of its axes: without
    another one each ring step would transpose what it reads and what it returns.
    """
    if not is_cpu():
        return arrays
    return jax.tree.map(lambda x: x.transpose(order) if x.ndim == 4 else x, arrays)


def _zeros(rows: Rows) -> jax.Array:
    return jnp.zeros(rows[0].shape, rows[2].dtype)  # (B, L, H, D)


def _cut_heads(
    rows: Rows, kv: Pair, kv_head: int
) -> tuple[tuple[Rows, Rows], tuple[Pair, Pair]]:
    """Cuts operands in two at a key/value head, and its first query head."""
    head = rows[0].shape[2] // kv[0].shape[2] * kv_head
    axes = 2, 2, 1, 1
    cut = [jnp.split(x, [head], axis) for x, axis in zip(rows, axes, strict=True)]
    keys = [jnp.split(x, [kv_head], 2) for x in kv]
    first, second = zip(*cut, strict=True)
    k, v = keys
    return (first, second), ((k[0], v[0]), (k[1], v[1]))


def halves(bounds: Bounds, length: int) -> tuple[Pair, Pair]:
    """Splits intervals into those of the first half of the queries, and of the second.

    bounds: (B, L) each, within [0, length]. The other half's are empty, at the end of
    the keys or at their start, so that bounds do not decrease along the queries.
    """
    first = np.arange(bounds[0].shape[1]) < bounds[0].shape[1] // 2
    k_start, k_end = bounds
    early = jnp.where(first, k_start, length), jnp.where(first, k_end, length)
    late = jnp.where(first, 0, k_start), jnp.where(first, 0, k_end)
    return early, late


def _loop(first: int, end: int, body: Callable, state: tuple) -> tuple:
    """Runs `state = body(step, *state)` for the ring steps first … end - 1."""
    if end - first < UNROLLED_STEPS:
        for step in range(first, end):
            state = body(step, *state)
        return state
    steps = jnp.arange(first, end, dtype=jnp.int32)
    return lax.scan(
        lambda state, step: (body(step, *state), None), state, steps, unroll=LOOP_UNROLL
    )[0]
