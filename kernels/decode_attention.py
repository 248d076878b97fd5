"""Attention of a few new tokens to a KV cache whose slots are sharded over the ring.

Every device of the ring computes the attention of all new queries to the slots that it
holds, and the partial results are merged: the data sent is as large as the queries, not
as the cache. The mask is computed from the index of the token in each slot, so that
slots may be filled in any order, and rows of a batch may differ in length. Free slots
have the largest int32 as index, which no query sees. Of a cache that is not full, a few
tokens read no more than twice the slots that are taken.

Caches are stacks of layers: (Y, B, S, K, D), Y layers and S slots in all, of which each
device holds S / N. They are written in place where the compiler can reuse them.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from . import checks
from .backends.reference import masked
from .masks import Visible, in_interval
from .merge import Partial, merge, merge_over
from .placement import over_mesh
from .precision import Scores, accumulator_type

MOST_TOKENS = np.iinfo(np.int32).max
"""Index of free slots, so that no query sees them: bounds are clipped to it."""
REPLICATED = PartitionSpec()
FEWEST_SLOTS = 128
"""Slots of a device that are always read: fewer would save nothing."""
FEW_TOKENS = 8
"""New tokens that read live slots alone; for more, branches take memory themselves."""


@dataclass(frozen=True)
class CachedAttention:
    """Writes to, and attention to, caches on a mesh.

    mesh: has the `ring_axes`, which make up one ring.
    batch_axes, head_axis, scale, soft_cap: as in `make_ring_attention`.

    Raises:
      ValueError: the mesh has no such axes, or the scale or the cap is out of range.
    """

    mesh: Mesh
    ring_axes: str | tuple[str, ...] = ("ring",)
    batch_axes: str | tuple[str, ...] | None = None
    head_axis: str | tuple[()] | None = None
    scale: float | None = None
    soft_cap: float | None = None

    def __post_init__(self):
        if not self._axes.ring:
            raise ValueError("ring_axes must be at least one axis of the mesh, got ()")
        checks.checked_scale(self.scale, head_size=1)
        checks.checked_soft_cap(self.soft_cap)

    @property
    def ring_size(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self._axes.ring)

    def fill(self, stack: jax.Array, new: jax.Array, layer: jax.Array) -> jax.Array:
        """Writes each device's shard of `new` (B, T, …) to its first slots.

        stack: (Y, B, S, …), T at most S and a multiple of N.

        Raises:
          ValueError: T is not, the tokens do not have the stack's shape and type, or
            the layer is unknown.
        """
        _check_new(stack, new, layer)
        if new.shape[1] > stack.shape[2] or new.shape[1] % self.ring_size:
            raise ValueError(
                f"tokens must fit a cache of {stack.shape[2]} slots over a ring of "
                f"{self.ring_size}, got {new.shape[1]}: give it more slots, and pad "
                "the tokens to a multiple of the ring"
            )

        def local(stack, new, layer):
            start = layer, *(0,) * (stack.ndim - 1)
            return lax.dynamic_update_slice(stack, new[None], start)

        sharded, shards = self._specs(stack, self._axes.ring)
        call = over_mesh(local, self.mesh, (sharded, shards, REPLICATED), sharded)
        return call(stack, new, layer)

    def put(
        self,
        stack: jax.Array,
        new: jax.Array,
        layer: jax.Array,
        member: jax.Array,
        slot: jax.Array,
    ) -> jax.Array:
        """Writes `new` (B, m, …) to slots `slot` … `slot + m - 1` of one ring member.

        stack: (Y, B, S, …). Layer, member and slots must exist, which is checked where
          they are known: under `jit` XLA clamps them, and overwrites other slots.

        Raises:
          ValueError: they do not exist, or the tokens do not have the stack's shape and
            type.
        """
        _check_new(stack, new, layer)
        _check_within("member", member, self.ring_size)
        last = stack.shape[2] // self.ring_size - new.shape[1]
        _check_within(f"the first slot of {new.shape[1]} tokens", slot, last + 1)

        def local(stack, new, layer, member, slot):
            # Every member runs this: the others write what they have.
            start = layer, 0, slot, *(0,) * (stack.ndim - 3)
            old = lax.dynamic_slice(stack, start, (1, *new.shape))
            mine = lax.axis_index(self._axes.ring) == member
            new = jnp.where(mine, new[None], old)
            return lax.dynamic_update_slice(stack, new, start)

        specs = *self._specs(stack), *(REPLICATED,) * 3
        call = over_mesh(local, self.mesh, specs, specs[0])
        return call(stack, new, layer, member, slot)

    def attend(
        self,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        index: jax.Array,
        visible: Visible,
        layer: jax.Array,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Computes attention of q (B, m, H, D) to a layer of the cache: as q.

        keys, values: (Y, B, S, K, D). index: int32 (B, S), of the token in each slot.
        visible: k_start, k_end int32 (B or 1, m), half-open interval of the key indices
          of each query; an empty one gives zeros. Or several, (intervals, B or 1, m).
        sinks: (H,), as in `attention.attention`.

        All slots must be finite, free ones too: see `masks`.

        Raises:
          ValueError: operands that do not fit together, or the layer is unknown.
        """
        checks.check_operands(
            q, *(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (keys, values))
        )
        visible = checks.check_visible(q, visible).intervals()
        bounds = tuple(checks.clipped(x, MOST_TOKENS) for x in visible)
        if keys.shape != values.shape or index.shape != keys.shape[1:3]:
            raise ValueError(
                "keys and values must be (Y, B, S, K, D) and index (B, S), got "
                f"{keys.shape}, {values.shape} and {index.shape}"
            )
        _check_within("layer", layer, keys.shape[0])
        scale = checks.checked_scale(self.scale, q.shape[-1])
        scores = Scores(scale, checks.checked_soft_cap(self.soft_cap))
        if (sinks := checks.checked_sinks(sinks, q)) is None:
            sinks = jnp.full(q.shape[2], -jnp.inf, accumulator_type(q.dtype))

        def local(q, keys, values, index, bounds, layer, sinks):
            partial = _of_live_slots(q, (keys, values), index, bounds, layer, scores)
            out, lse = merge_over(self._axes.ring, partial)
            # As one more key, after the devices' results are merged: each of them
            # would count it.
            sink = jnp.broadcast_to(sinks[:, None], lse.shape)  # (B, H, m)
            out, _ = merge((jnp.zeros((), out.dtype), sink), (out, lse))
            return out.astype(q.dtype)

        stack, queries = self._specs(keys)
        # Of bounds (intervals, B or 1, m), one row stands for all of the batch.
        rows = PartitionSpec(None, self._axes.batch if len(bounds[0][0]) > 1 else None)
        slots = PartitionSpec(self._axes.batch, self._axes.ring)
        heads = PartitionSpec(self._axes.heads)
        specs = queries, stack, stack, slots, rows, REPLICATED, heads
        call = over_mesh(local, self.mesh, specs, queries)
        return call(q, keys, values, index, bounds, layer, sinks)

    @property
    def _axes(self) -> checks.Axes:
        return checks.checked_axes(
            self.mesh, self.ring_axes, self.batch_axes, self.head_axis
        )

    def _specs(
        self, stack: jax.Array, tokens: tuple[str, ...] | None = None
    ) -> tuple[PartitionSpec, PartitionSpec]:
        """Returns the specs of a stack (Y, B, S) or (Y, B, S, K, D), and of new tokens.

        tokens: axes that these are sharded over; None: they are replicated.
        """
        batch = self._axes.batch
        heads = (self._axes.heads, None)[: stack.ndim - 3]
        sharded = PartitionSpec(None, batch, self._axes.ring, *heads)
        return sharded, PartitionSpec(batch, tokens, *heads)


def _check_new(stack: jax.Array, new: jax.Array, layer: jax.Array) -> None:
    """Refuses tokens that XLA would broadcast, cast or write elsewhere."""
    want = stack.shape[1], *stack.shape[3:]
    got = *new.shape[:1], *new.shape[2:]
    if got != want or new.shape[1] == 0 or new.dtype != stack.dtype:
        raise ValueError(
            f"new tokens of a cache {stack.shape} in {stack.dtype} must be (B, tokens, "
            "K, D), with at least 1 token and all else as in the cache, got "
            f"{new.shape} in {new.dtype}"
        )
    _check_within("layer", layer, stack.shape[0])


def _check_within(name: str, number: jax.Array | int, stop: int) -> None:
    if not jnp.issubdtype(jnp.result_type(number), jnp.integer):
        raise ValueError(f"{name} must be an integer, got {jnp.result_type(number)}")
    value = checks.known(number)
    if value is not None and not 0 <= value < stop:
        raise ValueError(
            f"{name} must be from 0 to {stop - 1} in this cache, got {value}"
        )


def _of_live_slots(
    q: jax.Array,
    stacks: tuple[jax.Array, jax.Array],
    index: jax.Array,
    bounds: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    scores: Scores,
) -> Partial:
    """Returns attention of q (B, m, H, D) to a device's slots: live ones if m is small.

    stacks: keys and values, (Y, B, S / N, K, D). index: int32 (B, S / N). bounds: int32
      (intervals, B or 1, m) each.
    """

    def of_first(slots: int) -> Partial:
        _, rows, _, heads, depth = stacks[0].shape
        start = layer, 0, 0, 0, 0
        shape = 1, rows, slots, heads, depth
        k = lax.dynamic_slice(stacks[0], start, shape)[0]  # (B, slots, K, D)
        v = lax.dynamic_slice(stacks[1], start, shape)[0]
        k_start = bounds[0][..., None]  # (…, B, m, 1)
        k_end = bounds[1][..., None]
        mask = in_interval(k_start, index[:, None, :slots], k_end)
        return masked(q, k, v, mask.any(axis=0), scores)  # (B, m, slots)

    # Slots fill up from the first: a switch among a few lengths reads up to twice the
    # live ones, and compiles as many programs.
    few = q.shape[1] <= FEW_TOKENS
    sizes = _sizes(index.shape[1]) if few else [index.shape[1]]
    live = _live_slots(index, bounds[1])
    branch = (live > np.array(sizes[:-1], np.int32)).sum(dtype=jnp.int32)
    return lax.switch(branch, [functools.partial(of_first, size) for size in sizes])


def _sizes(slots: int) -> list[int]:
    """Returns numbers of slots, growing twofold to all, of which the least is read."""
    sizes = [slots]
    while sizes[0] > FEWEST_SLOTS:
        sizes.insert(0, -(-sizes[0] // 2))
    return sizes


def _live_slots(index: jax.Array, k_end: jax.Array) -> jax.Array:
    """Counts slots up to the last that a query may see: int32 scalar.

    index: int32 (B, S / N). k_end: int32 (intervals, B or 1, m).
    """
    # The last one decides: slots before it may be free, in some rows or in all.
    count = jnp.arange(1, index.shape[1] + 1, dtype=jnp.int32)
    return jnp.where(index < k_end.max(), count, 0).max(initial=0)
