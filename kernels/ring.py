"""Ring attention: exact attention over a sequence sharded over a ring of devices.

Every device keeps its queries. In each ring step, keys and values are sent to the next
device while those that have arrived are attended to (Ring Attention, 2310.01889). In
the backward pass dq stays, and dk and dv follow their keys and values one step behind,
so that the next step's compute overlaps their transfer too; half of the local block's
queries are deferred to overlap the last transfer.

A query's keys on a visiting shard are an interval of the shard's slots, counted by the
layout: neither this file nor the kernels know layouts or masks. A ring of one device is
attention on that device.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import layout as memory_layout
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from . import reference
from .backends import Backend, check_implementation, choose
from .checks import (
    Axes,
    check_operands,
    check_order,
    check_shards,
    checked_axes,
    checked_bounds,
    checked_scale,
)
from .device import device_kind
from .layouts import Array, Layout, check_length, front_slots, order
from .masks import Mask, Visible, full
from .precision import product

UNROLLED_STEPS = 16
"""Rings with more steps are compiled as a loop: its compile time does not grow."""

LOOP_UNROLL = 2
"""Ring steps in an iteration of that loop: keys alternate between two buffers, and are
not copied back into one."""

LANES = 128
"""A TPU's memory pads the last dimension of arrays to a multiple of this."""

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
    keep_tail: as in `make_ring_attention`.
    """

    axis_name: str | tuple[str, ...] | None
    size: int
    layout: Layout
    scale: float
    backend: Backend
    keep_tail: bool = False

    def shard(self) -> jax.Array | int:
        """Returns the number of the shard that this device's queries belong to."""
        return lax.axis_index(self.axis_name) if self.size > 1 else 0

    def slots(self, shard: jax.Array | int, visible: Visible, length: int) -> Bounds:
        """Returns the interval [k_start, k_end) of visible slots of a shard."""
        k_start = self.layout.count(shard, visible.k_start, self.size, length)
        k_end = self.layout.count(shard, visible.k_end, self.size, length)
        return k_start, k_end  # as visible, (B or 1, L)

    def rotate(self, arrays: Pair) -> Pair:
        """Sends the arrays to the next device of the ring."""
        neighbours = [(d, (d + 1) % self.size) for d in range(self.size)]
        return lax.ppermute(arrays, self.axis_name, neighbours)

    def as_read(self, x: jax.Array) -> jax.Array:
        """Lays out (B, L, H, D) as a TPU's kernels read it: (B, H, L, D) in memory.

        D is padded to a multiple of 128, which it takes in a TPU's memory anyway. An
        array sent like this arrives like this; otherwise each ring step would transpose
        and pad it. On other devices, and in a ring of one, x is returned unchanged.
        """
        if self.size == 1 or not device_kind().startswith("TPU"):
            return x
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, -x.shape[-1] % LANES),))
        heads_first = memory_layout.Layout(major_to_minor=(0, 2, 1, 3))
        return memory_layout.with_layout_constraint(x, heads_first)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
) -> Pair:
    """Returns the attention of the local queries to the keys of the whole ring.

    q: (B, L, H, D). k, v: (B, L, K, D), the local shards.
    k_start, k_end: int32 (B, L) or (1, L), half-open interval of the key indices that
      each local query attends to.

    Returns:
      out (B, L, H, D) in the type of q, lse (B, H, L) in float32.
    """
    return _attend_forward(ring, q, k, v, k_start, k_end)[0]


def _attend_forward(ring, q, k, v, k_start, k_end):
    length = k.shape[1]
    keys = front_slots(ring.layout, ring.size, length) if ring.keep_tail else 0
    rows = q.shape[1] // 2 if keys else 0
    qkv, visible, front = (q, k, v), Visible(k_start, k_end), ()
    if rows:
        front = _attend_rows(ring, slice(rows), keys, qkv, visible)
        qkv, _ = lax.optimization_barrier((qkv, front))  # one ring after the other
    tail = _attend_rows(ring, slice(rows, None), length, qkv, visible)
    # Named here, where the backward's residuals are made, so that a remat policy can
    # save these two and not rerun the ring (names given outside have no effect).
    out, lse = map(checkpoint_name, tail, ("attention_out", "attention_lse"))
    if front:
        names = "attention_front_out", "attention_front_lse"
        early, early_lse = map(checkpoint_name, front, names)
        out = jnp.concatenate([early, out], axis=1)  # (B, L, H, D)
        lse = jnp.concatenate([early_lse, lse], axis=2)  # (B, H, L)
    return (out, lse), (q, k, v, k_start, k_end, out, lse)


def _attend_rows(ring, rows, keys, qkv, visible):
    """Attends with a slice of the queries to the first `keys` slots of every shard.

    A query that sees other slots gets nan: its result would be wrong.
    """
    (q, k, v), length, end = qkv, qkv[1].shape[1], keys * ring.size
    visible = seen = Visible(*(bound[:, rows] for bound in visible))
    if keys < length:
        seen = Visible(*(jnp.minimum(bound, end) for bound in visible))
    kv = ring.as_read(k[:, :keys]), ring.as_read(v[:, :keys])  # D, or in whole lanes
    out, lse = _forward_steps(ring, ring.as_read(q[:, rows]), kv, seen, length)
    out = out[..., : q.shape[-1]].astype(q.dtype)  # (B, T, H, D)
    if keys < length:
        is_wrong = (visible.k_start < visible.k_end) & (visible.k_end > end)
        out = jnp.where(is_wrong[..., None, None], jnp.nan, out)
    return out, lse


def _attend_backward(ring, residuals, cotangents):
    q, k, v, k_start, k_end, out, lse = residuals
    do, d_lse = cotangents
    # ds = p · (dp - delta) + p · d_lse: the gradient of lse joins delta.
    delta = product("bthd,bthd->bht", out, do) - d_lse  # (B, H, L)
    rows = ring.as_read(q), ring.as_read(do), lse, delta
    kv = ring.as_read(k), ring.as_read(v)
    gradients = _backward_steps(ring, rows, kv, Visible(k_start, k_end))
    return *(x[..., : q.shape[-1]].astype(q.dtype) for x in gradients), None, None


attend.defvjp(_attend_forward, _attend_backward)


def _forward_steps(
    ring: Ring, q: jax.Array, kv: Pair, visible: Visible, length: int
) -> Pair:
    def compute(step, kv, carry):
        source = (ring.shard() - step) % ring.size
        bounds = ring.slots(source, visible, length)
        return ring.backend.forward(q, *kv, *bounds, scale=ring.scale, carry=carry)

    def step_and_rotate(step, kv, carry):
        arriving = ring.rotate(kv)
        carry = compute(step, kv, carry)
        # Without the barrier XLA may start all transfers at once, or late.
        return lax.optimization_barrier((arriving, carry))

    if ring.size == 1:
        return compute(0, kv, None)
    state = step_and_rotate(0, kv, None)
    state = _loop(1, ring.size - 1, step_and_rotate, state)
    return compute(ring.size - 1, *state)


def _backward_steps(
    ring: Ring, fixed: tuple[jax.Array, ...], kv: Pair, visible: Visible
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, do, lse, delta = fixed
    length = kv[0].shape[1]

    def bounds(step):
        return ring.slots((ring.shard() - step) % ring.size, visible, length)

    def compute(bounds, kv, dq):
        dq, dk, dv = ring.backend.backward(
            q, *kv, do, lse, delta, *bounds, scale=ring.scale, dq=dq
        )
        return dq, (dk, dv)

    def step_and_rotate(step, kv, dq, dkv):
        # The gradients summed so far for these keys follow them, one step behind.
        arriving, dkv = ring.rotate(kv), ring.rotate(dkv)
        dq, partial = compute(bounds(step), kv, dq)
        arriving, dkv, dq, partial = lax.optimization_barrier(
            (arriving, dkv, dq, partial)
        )
        return arriving, dq, _add(dkv, partial)

    dq = jnp.zeros(q.shape, lse.dtype)  # (B, L, H, D)
    if ring.size == 1:
        dq, (dk, dv) = compute(bounds(0), kv, dq)
        return dq, dk, dv
    # The local block is computed in halves: the first half of the queries overlaps the
    # first transfer of keys, the second half the transfer of dk and dv to their owner.
    early, late = halves(bounds(0), length)
    arriving = ring.rotate(kv)
    dq, partial = compute(early, kv, dq)
    state = lax.optimization_barrier((arriving, dq, partial))
    visiting, dq, dkv = _loop(1, ring.size - 1, step_and_rotate, state)
    dkv = ring.rotate(dkv)
    dq, partial = compute(bounds(ring.size - 1), visiting, dq)
    dkv, dq, partial = lax.optimization_barrier((dkv, dq, partial))
    dkv = ring.rotate(_add(dkv, partial))
    dq, partial = compute(late, kv, dq)
    dkv, dq, partial = lax.optimization_barrier((dkv, dq, partial))
    return dq, *_add(dkv, partial)


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


def _add(dkv: Pair, partial: Pair) -> Pair:
    return dkv[0] + partial[0], dkv[1] + partial[1]


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: jax.Array,
    k_end: jax.Array,
    *,
    axis_name: str | tuple[str, ...],
    layout: Layout,
    scale: float | None = None,
    implementation: str | Backend | None = None,
    keep_tail: bool = False,
) -> jax.Array:
    """Computes attention over the ring `axis_name` on local shards, in `shard_map`.

    Arguments and result as in `attend`, q in the order of `layout`; `scale` is
    1/sqrt(D) unless given, `implementation` as in `one_device.attention`, `keep_tail`
    as in `make_ring_attention`. Bounds do not say which tokens are padding: all
    operands must be finite, or see `Mask.fill_padding`. Decreasing bounds are not
    refused here, as they are traced: see `checks.check_increasing`.

    Raises:
      ValueError: operands that do not fit together or are not shards of the layout, an
        unknown implementation, or `shard_map` checks how values vary over the mesh.
    """
    check_operands(q, k, v)
    size = lax.axis_size(axis_name)
    check_length(layout, size, size * k.shape[1])
    visible = checked_bounds(q, Visible(k_start, k_end), size * k.shape[1])
    scale = checked_scale(scale, q.shape[-1])
    backend = choose(implementation, q.dtype)
    is_checked = any(jax.typeof(x).manual_axis_type.varying for x in (q, k, v))
    if is_checked and backend is not reference:
        raise ValueError(
            "ring_attention must run in jax.shard_map(..., check_vma=False), or with "
            "implementation='reference': loops and kernels cannot declare how their "
            "results vary over the mesh"
        )
    ring = Ring(axis_name, size, layout, scale, backend, keep_tail)
    return attend(ring, q, k, v, *visible)[0]


def make_ring_attention(
    mesh: Mesh,
    *,
    layout: Layout,
    ring_axes: str | tuple[str, ...] = ("ring",),
    batch_axes: str | tuple[str, ...] | None = None,
    head_axis: str | None = None,
    scale: float | None = None,
    implementation: str | Backend | None = None,
    keep_tail: bool = False,
) -> Callable[..., jax.Array]:
    """Builds ring attention on global arrays.

    mesh: has `ring_axes`, which make up one ring, in the mesh's order.
    batch_axes, head_axis: axes that batch and heads are sharded over; None for those of
      "data" and "fsdp", and "tensor", that the mesh has.
    layout, scale, implementation: as in `ring_attention`.
    keep_tail: a checkpoint that saves "attention_out" and "attention_lse" saves those
      of the last half of each shard's queries (BurstEngine, 2509.19836); the others are
      a ring of their own, over the first half of the keys, that it reruns: a quarter of
      a causal, striped ring. For causal masks: an early query that sees a key of the
      last halves gets nan. Without such halves all is saved: see `layouts.front_slots`.

    Returns:
      attend(q, k, v, visible) -> out: q (B, T, H, D), k and v (B, S, K, D), in layout
      order along T and S (see `layouts.permute`); `visible` a mask of `masks`, or
      bounds (B or 1, T) in the order of q, as in `one_device.attention`.

    Raises:
      ValueError: the mesh has no such axes; from attend, shapes that cannot be sharded,
        or decreasing bounds whose values are known.
    """
    axes = checked_axes(mesh, ring_axes, batch_axes, head_axis)
    check_order(mesh, axes.ring)
    check_implementation(implementation)  # here, and not when compiling
    checked_scale(scale, head_size=1)
    ring_size = math.prod(mesh.shape[axis] for axis in axes.ring)
    check_length(layout, ring_size, length=0)
    local = functools.partial(
        ring_attention,
        axis_name=axes.ring,
        layout=layout,
        scale=scale,
        implementation=implementation,
        keep_tail=keep_tail,
    )

    def attend(
        q: jax.Array, k: jax.Array, v: jax.Array, visible: Mask | Visible
    ) -> jax.Array:
        check_operands(q, k, v)
        queries, keys = (order(layout, ring_size, x.shape[1]) for x in (q, k))
        check_shards("rows", "B", k.shape[0], axes.batch, mesh)
        heads = () if axes.heads is None else (axes.heads,)
        check_shards("key/value heads", "K", k.shape[2], heads, mesh)
        mask = full()
        if isinstance(visible, Mask):
            mask, visible = visible, visible(jnp.asarray(queries), k.shape[1])
        visible = checked_bounds(q, visible, k.shape[1], queries)
        q = mask.fill_padding(q, queries)
        k, v = (mask.fill_padding(x, keys) for x in (k, v))
        out = _over_mesh(local, mesh, axes)(q, k, v, visible)
        return mask.fill_padding(out, queries)

    return attend


def _over_mesh(local: Callable, mesh: Mesh, axes: Axes) -> Callable[..., jax.Array]:
    """Maps `ring_attention` over the shards of global q, k, v and bounds."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible) -> jax.Array:
        array = PartitionSpec(axes.batch, axes.ring, axes.heads, None)
        rows = None if visible.k_start.shape[0] == 1 else axes.batch
        in_specs = (*(array,) * 3, *(PartitionSpec(rows, axes.ring),) * 2)
        # Every axis is in the specs, so shard_map sums nothing over it by itself, and
        # Pallas kernels cannot declare how their results vary over the mesh.
        sharded = jax.shard_map(
            local, mesh=mesh, in_specs=in_specs, out_specs=array, check_vma=False
        )
        operands = q, k, v, *visible
        if AxisType.Explicit in mesh.axis_types:  # as those of jax.make_mesh are
            shardings = (NamedSharding(mesh, spec) for spec in in_specs)
            operands = map(jax.reshard, operands, shardings)
        return sharded(*operands)

    return run
