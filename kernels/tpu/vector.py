"""Matmuls, layouts of one number a row, and bytes of the TPU kernels' arrays."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from .block_sizes import TpuBlocks

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


class TileConfig(NamedTuple):
    """Constants of a kernel.

    blocks: what its tiles are cut into.
    scale: log2(e) times the factor on scores, which are exponents of 2 in the kernels.
    precision: of the matmuls.
    """

    blocks: TpuBlocks
    scale: float
    precision: lax.Precision

    def scores(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns scaled scores: [m, D], [n, D] -> [m, n], float32."""
        return self.scale * dot(a, b, NT, self.precision)


def broadcast_lanes(x: jax.Array, width: int) -> jax.Array:
    """Repeats equal lanes: [rows, 128] -> [rows, width]."""
    return jnp.tile(x, (1, width // LANES))


def reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1 / x of normal float32 numbers.

    Two Newton steps from the unit's guess, of 8 bits or more. A division costs the VPU
    twice as much, for the sake of denormal numbers.
    """
    guess = pltpu.reciprocal(x, approx=True)
    for _ in range(2):
        guess = guess * (2.0 - x * guess)
    return guess


def int_to_float_bits(x: jax.Array) -> jax.Array:
    """Packs int32 in [0, 2**29] into float32 that `row_to_column` keeps exactly.

    The VPU does not sum integers over lanes. Bits of a float32 survive that, in a sum
    with zeros, unless they are a denormal number's: hence the offset.
    """
    return lax.bitcast_convert_type(x + _FLOAT_BITS, jnp.float32)


def float_bits_to_int(x: jax.Array) -> jax.Array:
    """Undoes `int_to_float_bits`."""
    return lax.bitcast_convert_type(x, jnp.int32) - _FLOAT_BITS


def row_to_column(row: jax.Array) -> jax.Array:
    """Transposes 128 numbers: [1, 128] -> [128, 128], equal lanes."""
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
