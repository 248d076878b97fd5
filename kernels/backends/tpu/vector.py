"""Matmuls, layouts of one number a row, and bytes of the TPU kernels' arrays."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8

# Dimensions that `dot` contracts, named as in BLAS.
NT = (1, 1)  # [m, d], [n, d] -> [m, n]
NN = (1, 0)  # [m, n], [n, d] -> [m, d]
TN = (0, 0)  # [n, m], [n, d] -> [m, d]

_FLOAT_BITS = 0x40000000  # of 2.0


def dot(
    a: jax.Array,
    b: jax.Array,
    contracted: tuple[int, int],
    precision: lax.Precision,
) -> jax.Array:
    """Multiplies two matrices on the MXU: float32, over one dimension of each."""
    dimensions = ((contracted[:1], contracted[1:]), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def fold(combine: Callable, x: jax.Array, axis: int) -> jax.Array:
    """Combines vector registers along an axis: leaves 8 rows, or 128 columns."""
    width = LANES if axis else SUBLANES
    pieces = (
        lax.slice_in_dim(x, first, first + width, axis=axis)
        for first in range(0, x.shape[axis], width)
    )
    return functools.reduce(combine, pieces)


def broadcast_lanes(x: jax.Array, width: int) -> jax.Array:
    """Repeats equal lanes: [rows, 128] -> [rows, width]."""
    return jnp.tile(x, (1, width // LANES))


def reciprocal(x: jax.Array, newton_steps: int = 2) -> jax.Array:
    """Returns 1 / x of normal float32 numbers.

    Newton steps from the unit's guess, of 8 bits or more. A division costs the VPU
    twice as much, for the sake of denormal numbers.
    """
    guess = pltpu.reciprocal(x, approx=True)
    for _ in range(newton_steps):
        guess = guess * (2.0 - x * guess)
    return guess


def whole(x: jax.Array, size: int) -> jax.Array:
    """Returns x // size, for a power of 2, as one instruction and not a dozen."""
    return lax.shift_right_arithmetic(x, jnp.int32(size.bit_length() - 1))


def row_to_column(row: jax.Array) -> jax.Array:
    """Transposes 128 numbers: [1, 128] -> [128, 128], equal lanes.

    Integers must be in [0, 2**29]. The VPU does not sum them over lanes. Bits of a
    float32 survive that, in a sum with zeros, unless they are a denormal number's:
    hence the offset.
    """
    if row.dtype == jnp.int32:
        bits = lax.bitcast_convert_type(row + _FLOAT_BITS, jnp.float32)
        return lax.bitcast_convert_type(row_to_column(bits), jnp.int32) - _FLOAT_BITS
    diagonal = jnp.where(_is_diagonal(), row, 0.0)  # [128, 128]
    column = diagonal.sum(axis=1, keepdims=True)  # [128, 1]
    return jnp.broadcast_to(column, (LANES, LANES))


def column_to_row(x: jax.Array) -> jax.Array:
    """Undoes `row_to_column`: [128, 128], equal lanes -> [1, 128]."""
    return jnp.where(_is_diagonal(), x, 0.0).sum(axis=0, keepdims=True)


def _is_diagonal() -> jax.Array:
    shape = LANES, LANES
    row, lane = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row == lane


def buffer_bytes(buffers: Any) -> int:
    """Returns the bytes of all arrays, or VMEM buffers, in a tree, less semaphores."""
    return sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(buffers)
        if jnp.issubdtype(x.dtype, jnp.number)
    )


def flat_index(operands: NamedTuple, field: str) -> int:
    """Returns the number of a field's first array, for `input_output_aliases`."""
    return len(jax.tree.leaves(operands[: operands._fields.index(field)]))
