"""Gathers of parameters' shards, and scatters of their gradients, over mesh axes.

A scatter can be permutes, from neighbour to neighbour: they run beside products, while
XLA for v4 and v5e waits for every reduce-scatter. Gathers overlap as they are.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels.devices.torus import Groups

Stages = tuple[tuple[str, Groups | None], ...]
"""Axes of a mesh, and which of their devices take part in a collective together."""

SUBLANES = 8
"""Rows that a TPU stores together: arrays are padded to a multiple of these."""

SCOPE = "parameters"
"""Name in a program of permutes of gradients, apart from those of a ring."""


@dataclass(frozen=True)
class Way:
    """How a parameter's shards are gathered, and its gradients scattered.

    stages: scattered one after another; gathers go the other way.
    axis: of the parameter, along which it is sharded. dtype: in which it travels.
    permutes: whether gradients travel in permutes, which run beside products.
    """

    stages: Stages
    axis: int
    dtype: jnp.dtype
    permutes: bool = False

    def whole(self, shard: jax.Array) -> jax.Array:
        """Gathers a parameter, rounded before it travels."""
        whole = shard.astype(self.dtype)
        # In reverse: in any other order shards would come back permuted.
        for name, groups in reversed(self.stages):
            whole = lax.all_gather(
                whole, name, axis=self.axis, axis_index_groups=groups, tiled=True
            )
        return checkpoint_name(whole, "whole_parameter")

    def scatter(self, gradient: jax.Array, done: int = 0) -> jax.Array:
        """Sums a gradient over devices; returns this device's part.

        done: stages that it has passed.
        """
        for name, groups in self.stages[done:]:
            if self.permutes:
                gradient = _scatter_by_permutes(gradient, self.axis, Line(name, groups))
            else:
                gradient = _scatter(gradient, self.axis, name, groups)
        return gradient


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(shard: jax.Array, way: Way) -> jax.Array:
    """Gathers a parameter; its gradient is scattered unrounded, in float32."""
    return way.whole(shard).astype(shard.dtype)


gather.defvjp(
    # The name inside: a remat policy does not see that of a call of `gather`.
    lambda shard, way: (way.whole(shard).astype(shard.dtype), None),
    lambda way, _, gradient: (way.scatter(gradient),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def multiply(x: jax.Array, shard: jax.Array, way: Way, inputs: int) -> jax.Array:
    """Multiplies x with a parameter, over its first axes and the last of x.

    The parameter's gradient travels beside pieces of the products that compute it and
    the gradient of x.

    shard: of the parameter. inputs: the axes that are summed over.
    """
    return _forward(x, shard, way, inputs)[0]


def _forward(
    x: jax.Array, shard: jax.Array, way: Way, inputs: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    whole = way.whole(shard)
    y = jnp.tensordot(x, whole, ([*range(-inputs, 0)], [*range(inputs)]))
    return y, (x, whole)


def _backward(
    way: Way, inputs: int, residuals: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, whole = residuals
    operands = (
        x.reshape(-1, *x.shape[x.ndim - inputs :]),  # (tokens, inputs…)
        dy.reshape(-1, *whole.shape[inputs:]),  # (tokens, outputs…)
    )
    axis_name, groups = way.stages[0]
    line = Line(axis_name, groups)
    is_cut_in_outputs = way.axis >= inputs
    # Of x or dy, after their tokens.
    along = 1 + way.axis - (inputs if is_cut_in_outputs else 0)
    # Tokens of each piece of x's gradient, which is made in size / 2 pieces.
    rows = -(-len(operands[0]) // (line.size // 2))

    def compute(
        operands: tuple[jax.Array, jax.Array], distance: int, number: int
    ) -> tuple[jax.Array, jax.Array]:
        """Returns a device's part of the gradient; every second time, rows of x's."""
        x, dy = operands
        dy_part = dy
        if is_cut_in_outputs:
            dy_part = line.part(dy, along, distance)
        else:
            x = line.part(x, along, distance)
        part = jnp.tensordot(x, dy_part, (0, 0), preferred_element_type=jnp.float32)
        dy = dy[number // 2 * rows :][: rows * (number % 2)]
        axes = [*range(1, dy.ndim)], [*range(inputs, whole.ndim)]
        return part, jnp.tensordot(dy, whole, axes)

    gradient, dx = _reduce(operands, compute, line, is_held=True)
    dx = jnp.concatenate(dx).reshape(x.shape).astype(x.dtype)
    return dx, way.scatter(gradient, done=1)


multiply.defvjp(_forward, _backward)


class Line:
    """Devices of a mesh axis, or of each of its groups, each the next one's neighbour.

    Arrays go half of the way round forwards, and half backwards.
    """

    def __init__(self, name: str, groups: Groups | None):
        self.name = name
        self.groups = groups or (tuple(range(lax.axis_size(name))),)
        self.size = len(self.groups[0])
        self.number = lax.axis_index(name)
        if groups:
            ranks = [0] * lax.axis_size(name)
            for line in groups:
                for rank, index in enumerate(line):
                    ranks[index] = rank
            self.number = jnp.array(ranks)[self.number]

    def send(self, x: jax.Array, sign: int) -> jax.Array:
        """Hands x on to the next device, or to the one before (sign -1)."""
        pairs = []
        for line in self.groups:
            for i in range(self.size):
                pairs.append((line[i], line[(i + sign) % self.size]))
        # By this name readers of a compiled program tell it from a ring's transfers.
        with jax.named_scope(SCOPE):
            return lax.ppermute(x, self.name, pairs)

    def part(self, x: jax.Array, axis: int, distance: int) -> jax.Array:
        """Returns the part of x of the device at this distance."""
        rows = x.shape[axis] // self.size
        start = (self.number + distance) % self.size * rows
        return lax.dynamic_slice_in_dim(x, start, rows, axis)


def _reduce(
    operands: Any, compute: Callable, line: Line, is_held: bool
) -> tuple[jax.Array, list]:
    """Sums what devices compute for each other, while the sums travel.

    Sums go forwards and backwards in turn, so that each is on its way while one that
    goes the other way is computed; the addition is a part of the product.

    compute: (operands, distance, number of the part) to the part of the device there,
      and something else to compute beside the transfers.
    is_held: whether a part is computed after the one before, as XLA would compute all
      before the first transfer.

    Returns:
      This device's sum, and what else was computed, by part.
    """
    arrived: dict[int, jax.Array] = {}  # the sum under way, by its direction
    others = []
    # The farthest device's part first: its sum has the longest way to go.
    for number, left in enumerate(range(line.size - 1, 0, -1)):
        sign = 1 if left % 2 else -1
        distance = (left + 1) // 2
        total, other = compute(operands, sign * distance, number)
        total = total + arrived.pop(sign, 0)
        if is_held:
            # The next part reads the operands that come out here: XLA cannot compute
            # it before this sum, nor all of them before the first transfer.
            held = lax.optimization_barrier((operands, total, other))
            operands, total, other = held
        arrived[sign] = line.send(total, sign)
        others.append(other)
    own, other = compute(operands, 0, line.size - 1)
    return sum(arrived.values(), own), [*others, other]


def _scatter_by_permutes(x: jax.Array, axis: int, line: Line) -> jax.Array:
    """Sums x over devices in permutes; returns this device's part along an axis."""
    return _reduce(
        x, lambda x, at, _: (line.part(x, axis, at), None), line, is_held=False
    )[0]


def _scatter(x: jax.Array, axis: int, name: str, groups: Groups | None) -> jax.Array:
    """Sums x over devices; returns this device's part along an axis.

    As (parts, …, minor), of two axes after the first: of more, along another axis, or
    for some lengths, XLA makes an all-reduce of it, twice the bytes. Parts that do not
    fill a TPU's sublanes stay as they are: to cut them off would copy all of x.
    """
    parts = len(groups[0]) if groups else lax.axis_size(name)
    if x.shape[axis] // parts % SUBLANES:
        return lax.psum_scatter(
            x, name, scatter_dimension=axis, axis_index_groups=groups, tiled=True
        )
    x = jnp.moveaxis(x, axis, 0)
    # (parts, length / parts · …, minor)
    split = x.reshape(parts, -1, *x.shape[1:][-1:])
    mine = lax.psum_scatter(split, name, axis_index_groups=groups)
    return jnp.moveaxis(mine.reshape(-1, *x.shape[1:]), 0, axis)
