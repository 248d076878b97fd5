"""Ring attention for callers: on local shards, or on global arrays over a mesh."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from . import checks
from .backends import Backend, blockwise, check_implementation, choose, reference
from .layouts import Contiguous, Layout, check_length, order, unpermute
from .masks import Array, Mask, Visible, full
from .placement import check_local, over_mesh, varying_alike
from .ring.attend import Ring, attend
from .ring.routes import Counted, Route, all_shards, route_within
from .ring.ulysses import over_heads

_COMPILED_ONCE = functools.partial(jax.jit, inline=True)
"""Compiles outside of `jit`; under one, the same program is traced as without it."""


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_start: Array,
    k_end: Array,
    *,
    axis_name: str | tuple[str, ...],
    layout: Layout,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    soft_cap: float | None = None,
    implementation: str | Backend | None = None,
    ulysses_axis: str | None = None,
    route: Route | None = None,
    with_lse: bool = False,
    natural_order: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention over the ring `axis_name` on local shards, in `shard_map`.

    q: (B, L, H, D), k, v: (B, L, K, D), the local shards, in the order of `layout`.
    k_start, k_end: signed integers (B or 1, L), or (m, B or 1, L) of m intervals: the
      half-open intervals of key indices that each query attends to. Decreasing bounds
      are not refused here, as they are traced: see `checks.check_increasing`. Bounds do
      not say which tokens are padding: all operands must be finite, or see
      `Mask.fill_padding`.
    scale, sinks, soft_cap, implementation: as in `attention.attention`. The gradient
      of the sinks is that of this device's queries; `shard_map` adds up the devices'.
    ulysses_axis: mesh axis whose devices hold a shard's slots in slices.
    route: how keys and values travel. Default: half of them each way round between TPUs
      (but v3), else all of them one way.
    with_lse, natural_order: as in `make_ring_attention`: with the latter, q, k, v and
      the bounds are this device's slices of the sequence, and so are the results.

    Returns:
      out (B, L, H, D), in the type of q.

    Raises:
      ValueError: operands that do not fit together or are not shards of the layout, an
        unknown implementation, or `shard_map` checks how values vary over the mesh and
        the implementation is a chip's.
    """
    checks.check_operands(q, k, v)
    size = lax.axis_size(axis_name)
    slices = 1 if ulysses_axis is None else lax.axis_size(ulysses_axis)
    num_keys = size * slices * k.shape[1]
    check_length(layout, size, num_keys, slices, natural_order)
    if natural_order:  # else the tokens of queries are known to the caller alone
        check_length(layout, size, size * slices * q.shape[1], slices, natural_order)
    visible = checks.checked_bounds(q, Visible(k_start, k_end), num_keys)
    scale = checks.checked_scale(scale, q.shape[-1])
    soft_cap = checks.checked_soft_cap(soft_cap)
    sinks = checks.checked_sinks(sinks, q)
    backend = choose(implementation, q.dtype, q.shape[-1])
    # The oracle is a few einsums, which XLA shards as their operands are.
    if backend is not reference:
        check_local(backend is not blockwise, q, k, v)
    q, k, v, sinks = varying_alike(q, k, v, sinks)
    route = route or all_shards()
    ring = Ring(axis_name, size, layout, scale, backend, soft_cap, route, natural_order)
    run = functools.partial(attend, ring)
    if ulysses_axis is not None:
        run = functools.partial(over_heads, run, ulysses_axis)
    k_start, k_end = visible.intervals()
    out, lse = run(q, k, v, sinks, k_start, k_end)
    return (out, lse) if with_lse else out


def make_ring_attention(
    mesh: Mesh,
    *,
    layout: Layout,
    ring_axes: str | tuple[str, ...] = ("ring",),
    batch_axes: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[()] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    implementation: str | Backend | None = None,
    ulysses_axis: str | None = None,
    one_way: bool = False,
    count_steps: bool = False,
    with_lse: bool = False,
    check_masks: bool = False,
    natural_order: bool = False,
) -> Callable[..., Any]:
    """Builds ring attention on global arrays.

    mesh: has `ring_axes`, which make up one ring, in the mesh's order.
    batch_axes, head_axis: axes that batch and heads are sharded over, () for none; None
      for those of "data" and "fsdp", and "tensor", that the mesh has.
    layout, scale, soft_cap, implementation: as in `ring_attention`.
    ulysses_axis: axis over which each shard's slots are cut in their order, and whose
      devices share out its heads in the ring: see `ulysses`.
    one_way: each device hands all keys and values on to the next. Between TPUs (but v3)
      half of them go the other way round without it, over half as busy links, in twice
      as many kernels. Keys that a few neighbours alone read, as of a `window`, go to
      these the shorter way in any case.
    count_steps: the ring ends where the bounds show no device anything further, which
      costs a small reduction: for packed documents in a contiguous or zigzag layout
      (stripes of any document are everywhere). Without it, shards are left out that
      no device reads by what is known of the mask when it is traced: of a `window`, all
      but the neighbours.
    with_lse: attend returns (out, lse), lse (B, H, T) in the order of q, as in
      `attention.attention_with_lse`.
    check_masks: under `jit`, where values are not known, rows whose bounds or ids
      decrease along the sequence, or whose intervals share keys, give nan, also as
      gradients, instead of wrong numbers: bounds in natural order, ids in layout order.
      It costs a gather of the bounds.
    natural_order: q, k, v, bounds and results are in natural order, in contiguous
      slices, and devices exchange them around the ring: nothing for `Contiguous`, half
      of each for `Mirror`, almost all for `Zigzag` and `Striped`.

    Returns:
      attend(q, k, v, visible, *, sinks=None, within=None) -> out: q (B, T, H, D), k and
      v (B, S, K, D), in layout order along T and S (see `layouts.permute`) unless
      natural_order; `visible` a mask of `masks`, or bounds (B or 1, T) or (m, B or 1,
      T) in the order of q, and sinks (H,), as in `attention.attention`; within, a mask
      that shows all that the bounds do, for a ring that sends no more than that: keys
      outside of it are not attended to. Outside of `jit` it compiles once for each
      mask, shape and type.

    Raises:
      ValueError: the mesh has no such axes; from attend, shapes that cannot be sharded,
        or decreasing bounds whose values are known.
    """
    axes = checks.checked_axes(mesh, ring_axes, batch_axes, head_axis, ulysses_axis)
    checks.check_order(mesh, axes.ring)
    check_implementation(implementation)  # here, and not when compiling
    checks.checked_scale(scale, head_size=1)
    checks.checked_soft_cap(soft_cap)
    ring_size = math.prod(mesh.shape[axis] for axis in axes.ring)
    check_length(layout, ring_size, length=0, natural_order=natural_order)

    # Kept by route: a new function each time would be traced, and compiled, each time.
    @functools.cache
    def compiled(route: Route) -> Callable[..., Any]:
        local = functools.partial(
            ring_attention,
            axis_name=axes.ring,
            layout=layout,
            scale=scale,
            soft_cap=soft_cap,
            implementation=implementation,
            ulysses_axis=ulysses_axis,
            route=route,
            with_lse=with_lse,
            natural_order=natural_order,
        )
        return _COMPILED_ONCE(_over_mesh(local, mesh, axes, with_lse))

    ring = _MeshRing(
        mesh=mesh,
        axes=axes,
        layout=layout,
        compiled=compiled,
        one_way=one_way,
        count_steps=count_steps,
        with_lse=with_lse,
        check_masks=check_masks,
        natural_order=natural_order,
    )
    return ring.attend


@dataclass(frozen=True)
class _MeshRing:
    """A ring over a mesh, with the options of `make_ring_attention`.

    compiled: route -> the ring on global q, k, v, bounds and sinks.
    """

    mesh: Mesh
    axes: checks.Axes
    layout: Layout
    compiled: Callable[[Route], Callable[..., Any]]
    one_way: bool
    count_steps: bool
    with_lse: bool
    check_masks: bool
    natural_order: bool

    @functools.cached_property
    def size(self) -> int:
        """Devices of the ring."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes.ring)

    @property
    def outside(self) -> Layout:
        """Layout of the global arrays."""
        return Contiguous() if self.natural_order else self.layout

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        visible: Mask | Visible,
        *,
        sinks: jax.Array | None = None,
        within: Mask | None = None,
    ) -> Any:
        """Computes attention on global arrays: see `make_ring_attention`."""
        checks.check_operands(q, k, v)
        sinks = checks.checked_sinks(sinks, q)
        self._check_shards(q, k)
        queries = order(self.outside, self.size, q.shape[1])
        keys = order(self.outside, self.size, k.shape[1])
        visible, mask = _bounds_and_mask(visible, within, q, queries, k.shape[1])
        # Kernels multiply masked keys by 0, and 0 · nan is nan.
        q = mask.fill_padding(q, queries)
        k = mask.fill_padding(k, keys)
        v = mask.fill_padding(v, keys)
        route = self._route(mask, queries, k.shape[1])
        results = self.compiled(route)(q, k, v, visible, sinks)
        if self.check_masks:
            in_order = visible.map(lambda x: unpermute(x, self.outside, self.size, -1))
            results = _poisoned(results, (*mask.decreases, *checks.are_wrong(in_order)))
        if not self.with_lse:
            return mask.fill_padding(results, queries)
        out, lse = results
        lse = mask.fill_padding(lse, queries, -jnp.inf, axis=2)
        return mask.fill_padding(out, queries), lse

    def _check_shards(self, q: jax.Array, k: jax.Array) -> None:
        """Refuses global arrays that the mesh cannot cut into equal shards."""
        slices = math.prod(self.mesh.shape[axis] for axis in self.axes.tokens)
        slices //= self.size
        for length in q.shape[1], k.shape[1]:
            check_length(self.layout, self.size, length, slices, self.natural_order)
        checks.check_shards("rows", "B", k.shape[0], self.axes.batch, self.mesh)
        heads = () if self.axes.heads is None else (self.axes.heads,)
        checks.check_shards("key/value heads", "K", k.shape[2], heads, self.mesh)

    def _route(self, mask: Mask, queries: np.ndarray, num_keys: int) -> Route:
        """Returns the shortest route that brings all keys that a mask may show.

        queries: index of each query, (T,).
        """
        route = None
        outline = None
        # What shards read is known where those of queries are those of keys.
        if self.size > 1 and len(queries) == num_keys:
            if self.natural_order:
                queries = order(self.layout, self.size, num_keys)
            outline = mask.outline(queries, num_keys)
        if outline is not None:
            route = route_within(
                outline, self.layout, self.size, self.count_steps, self.one_way
            )
        if isinstance(route, Counted):
            # Devices of all axes leave the loop at the same step, or they would wait.
            names = self.mesh.axis_names
            others = tuple(name for name in names if name not in self.axes.ring)
            return replace(route, other_axes=others)
        # Here no mesh need be in use, which would name the devices: see `device_kind`.
        device = self.mesh.abstract_mesh.abstract_device
        kind = device.device_kind if device else None
        return route or all_shards(self.one_way, kind)


def _bounds_and_mask(
    visible: Mask | Visible,
    within: Mask | None,
    q: jax.Array,
    queries: np.ndarray,
    num_keys: int,
) -> tuple[Visible, Mask]:
    """Returns bounds in the order of q, and a mask that shows all that they do.

    queries: index of each query, (T,).
    """
    index = jnp.asarray(queries)
    if isinstance(visible, Mask):
        mask = visible if within is None else visible & within
        return checks.checked_bounds(q, mask(index, num_keys), num_keys, queries), mask
    bounds = checks.checked_bounds(q, visible, num_keys, queries)
    if within is None:
        return bounds, full()
    return bounds & within(index, num_keys), within


def _poisoned(results: Any, is_wrong: Sequence[Array]) -> Any:
    """Multiplies rows, and so their gradients, by nan where any is true: (B or 1,)."""
    row = functools.reduce(jnp.logical_or, is_wrong)
    factor = jnp.where(row, jnp.nan, 1)  # (B or 1,)

    def poison(x: jax.Array) -> jax.Array:
        return x * factor.reshape(-1, *(1,) * (x.ndim - 1)).astype(x.dtype)

    return jax.tree.map(poison, results)


def _over_mesh(
    local: Callable, mesh: Mesh, axes: checks.Axes, with_lse: bool
) -> Callable[..., Any]:
    """Maps `ring_attention` over the shards of global q, k, v, bounds and sinks."""

    def on_shards(
        q: jax.Array, k: jax.Array, v: jax.Array, visible: Visible, sinks: Any
    ) -> Any:
        return local(q, k, v, visible.k_start, visible.k_end, sinks=sinks)

    def run(q: jax.Array, k: Any, v: Any, visible: Visible, sinks: Any) -> Any:
        array = PartitionSpec(axes.batch, axes.tokens, axes.heads, None)
        lse = PartitionSpec(axes.batch, axes.heads, axes.tokens)
        *intervals, rows, _ = visible.k_start.shape
        # Bounds that the batch shares are one row, which every device needs.
        rows = None if rows == 1 else axes.batch
        bound = PartitionSpec(*(None for _ in intervals), rows, axes.tokens)
        specs = array, array, array, bound, PartitionSpec(axes.heads)
        results = (array, lse) if with_lse else array
        return over_mesh(on_shards, mesh, specs, results)(q, k, v, visible, sinks)

    return run
