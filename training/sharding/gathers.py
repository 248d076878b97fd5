"""Gathers of parameters' shards, and scatters of their gradients, over mesh axes.

A scatter can be permutes, from neighbour to neighbour: they run beside products, while
XLA for v4 and v5e waits for every reduce-scatter. Gathers overlap as they are.
"""

import functools
import math
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

UNROLLED = 32
"""Most devices in a line for which each transfer is an instruction of the program, of
as many pairs as there are devices. Longer lines are loops: such a program would grow
with the square."""

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
    axis_name, groups = way.stages[0]
    line = Line(axis_name, groups)
    # x's gradient is made in as many pieces of equal length; tokens of 0 add nothing.
    pieces = line.size // 2
    tokens = math.prod(x.shape[: x.ndim - inputs])
    padding = -tokens % pieces
    operands = (
        _with_zeros(x.reshape(tokens, *x.shape[x.ndim - inputs :]), padding),
        _with_zeros(dy.reshape(tokens, *whole.shape[inputs:]), padding),
    )
    rows = (tokens + padding) // pieces
    is_cut_in_outputs = way.axis >= inputs
    # Of x or dy, after their tokens.
    along = 1 + way.axis - (inputs if is_cut_in_outputs else 0)

    def part(
        operands: tuple[jax.Array, jax.Array], distance: jax.Array | int
    ) -> jax.Array:
        """Returns a device's part of the parameter's gradient."""
        x, dy = operands
        if is_cut_in_outputs:
            dy = line.part(dy, along, distance)
        else:
            x = line.part(x, along, distance)
        return jnp.tensordot(x, dy, (0, 0), preferred_element_type=jnp.float32)

    def piece(
        operands: tuple[jax.Array, jax.Array], number: jax.Array | int
    ) -> jax.Array:
        """Returns a piece of x's gradient."""
        dy = lax.dynamic_slice_in_dim(operands[1], number * rows, rows)
        axes = [*range(1, dy.ndim)], [*range(inputs, whole.ndim)]
        return jnp.tensordot(dy, whole, axes)

    gradient, dx = Chain(line, part, piece).reduce(operands)
    dx = jnp.concatenate(dx)[:tokens].reshape(x.shape).astype(x.dtype)
    return dx, way.scatter(gradient, done=1)


def _with_zeros(x: jax.Array, count: int) -> jax.Array:
    """Appends rows of 0."""
    return jnp.pad(x, [(0, count)] + [(0, 0)] * (x.ndim - 1))


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

    def part(self, x: jax.Array, axis: int, distance: jax.Array | int) -> jax.Array:
        """Returns the part of x of the device at this distance."""
        rows = x.shape[axis] // self.size
        start = (self.number + distance) % self.size * rows
        return lax.dynamic_slice_in_dim(x, start, rows, axis)


@dataclass(frozen=True)
class Chain:
    """Sums what devices compute for each other, while the sums travel.

    Sums go forwards and backwards in turn, so that each is on its way while one that
    goes the other way is computed; the addition is a part of the product.

    part: (operands, distance) to the part of the device there.
    piece: (operands, number) to something else to compute beside the transfers, in
      line.size // 2 pieces. With it a part is computed after the one before: XLA would
      compute all of them before the first transfer.
    """

    line: Line
    part: Callable[[Any, Any], jax.Array]
    piece: Callable[[Any, Any], jax.Array] | None = None

    def reduce(self, operands: Any) -> tuple[jax.Array, list]:
        """Returns this device's sum, and the pieces in order, some of them joined."""
        # The farthest device's part first: its sum has the longest way to go.
        farthest = self.line.size // 2
        arrived = 0
        if self.line.size % 2:
            operands, total, _ = self._add(operands, -farthest, 0)
            arrived = self.line.send(total, -1)
        operands, total, _ = self._add(operands, farthest, 0)
        state = operands, total, arrived
        pieces = []
        # A loop begins after the first step: by then sums arrive from both sides.
        unrolled = 1 if self.line.size > UNROLLED else farthest - 1
        for number in range(unrolled):
            state, piece = self._step(state, number)
            pieces.append(piece)
        if unrolled < farthest - 1:
            numbers = jnp.arange(unrolled, farthest - 1)
            state, stacked = lax.scan(self._step, state, numbers)
            pieces.append(None if stacked is None else lax.collapse(stacked, 0, 2))
        operands, total, arrived = state
        arrived_last = self.line.send(total, 1)
        own = self.part(operands, 0)
        if self.piece:
            pieces.append(self.piece(operands, farthest - 1))
        return own + arrived + arrived_last, pieces

    def _step(
        self, state: tuple, number: jax.Array | int
    ) -> tuple[tuple, jax.Array | None]:
        """Sends a sum each way, each beside the product whose sum is sent next.

        Transfers end in the step that they begin in, as a loop's must.
        """
        operands, total, arrived = state
        distance = self.line.size // 2 - 1 - number
        arrived_next = self.line.send(total, 1)
        operands, total, piece = self._add(operands, -distance, arrived, number)
        arrived = self.line.send(total, -1)
        operands, total, _ = self._add(operands, distance, arrived_next)
        return (operands, total, arrived), piece

    def _add(
        self, operands: Any, distance: Any, arrived: Any, number: Any = None
    ) -> tuple[Any, jax.Array, jax.Array | None]:
        """Adds a part to the sum that has arrived; number: of a piece, if any."""
        total = self.part(operands, distance) + arrived
        if self.piece is None:
            return operands, total, None
        piece = None if number is None else self.piece(operands, number)
        # The next part reads the operands that come out here: XLA cannot compute it
        # before this sum, nor all of them before the first transfer.
        return lax.optimization_barrier((operands, total, piece))


def _scatter_by_permutes(x: jax.Array, axis: int, line: Line) -> jax.Array:
    """Sums x over devices in permutes; returns this device's part along an axis."""
    return Chain(line, lambda x, at: line.part(x, axis, at)).reduce(x)[0]


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
