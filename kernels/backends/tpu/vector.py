"""How arrays of the TPU kernels lie in vector registers; matmuls, and bytes."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128

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
    dimensions = ((contracted[:1], contracted[1:]), ((), ()))  # no batch
    return lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


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
    # Rounds down below 0 too, as // does: a staircase's base of -1 comes of that.
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
    row = lax.broadcasted_iota(jnp.int32, shape, 0)  # [128, 128]
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)  # [128, 128]
    return row == lane


@dataclass(frozen=True)
class Orientation:
    """Axis of the query rows, or in an accumulator over rows of the keys: 0 or 1.

        axis 0   S [rows, keys]     accumulators [rows, D]
                 numbers and sums of rows: [rows, 128], equal lanes or lane by lane
        axis 1   S^T [keys, rows]   accumulators [D, rows]
                 numbers of rows [1, rows], sums [8, rows], sublane by sublane

    sublanes: of a vector register; shapes are written for 8, TPU 8t has 16.

    A product whose result is D = 128 numbers wide fills half of a matrix unit 256 wide,
    as from v6e on: there D streams through it instead, along the sublanes.
    """

    axis: int
    sublanes: int = 8

    @classmethod
    def of(cls, chip: pltpu.TpuInfo, depth: int) -> "Orientation":
        """Returns the faster one for heads of D numbers."""
        return cls(int(depth < chip.mxu_column_size), chip.num_sublanes)

    @property
    def keys_axis(self) -> int:
        """Axis of the keys in scores, and of D in accumulators."""
        return 1 - self.axis

    @property
    def sum_width(self) -> int:
        """Numbers of a sum over keys that is not reduced yet."""
        return self.sublanes if self.axis else LANES

    @property
    def number_width(self) -> int:
        """Times that one number of a row is repeated."""
        return 1 if self.axis else LANES

    def ordered(self, rows: Any, others: Any) -> tuple[Any, Any]:
        """Returns both, what is of the rows at the index of their axis."""
        return (others, rows) if self.axis else (rows, others)

    def at(self, x_ref: jax.Ref, rows: pl.Slice) -> jax.Ref:
        """Returns some rows."""
        return x_ref.at[self.ordered(rows, slice(None))]

    def fold(self, combine: Callable, x: jax.Array, axis: int) -> jax.Array:
        """Combines vector registers along an axis: leaves 8 rows, or 128 columns."""
        width = LANES if axis else self.sublanes
        folded = lax.slice_in_dim(x, 0, width, axis=axis)  # as x, 8 or 128 along it
        for first in range(width, x.shape[axis], width):
            part = lax.slice_in_dim(x, first, first + width, axis=axis)
            folded = combine(folded, part)
        return folded

    def swap(self, x: jax.Array) -> jax.Array:
        """Turns [..., rows, D] into accumulators, and back."""
        return x.swapaxes(-1, -2) if self.axis else x

    def widen(self, x: jax.Array, width: int) -> jax.Array:
        """Repeats numbers of rows, to meet as many keys or D; axis 1 broadcasts."""
        return x if self.axis else jnp.tile(x, (1, width // LANES))

    # In HBM, numbers of rows take no more than they are: [R / 128, 128] or [1, R].

    def packed(self, rows: int) -> tuple[int, int]:
        """Returns the shape in HBM of R numbers of rows."""
        return (1, rows) if self.axis else (rows // LANES, LANES)

    def strip(self, number: int) -> tuple[pl.Slice, pl.Slice]:
        """Returns where 128 of these lie, as [1, 128]."""
        if self.axis:
            return pl.ds(0, 1), pl.ds(number * LANES, LANES)
        return pl.ds(number, 1), pl.ds(0, LANES)

    def unpack(self, row: jax.Array) -> jax.Array:
        """Returns numbers of rows from [1, 128]."""
        return row if self.axis else row_to_column(row)

    def pack(self, x: jax.Array) -> jax.Array:
        """Undoes `unpack`."""
        return x if self.axis else column_to_row(x)


UPRIGHT = Orientation(0)


def strips(rows: int) -> list[tuple[int, pl.Slice]]:
    """Returns numbers and rows of all strips of 128 rows."""
    return [(n, pl.ds(n * LANES, LANES)) for n in range(rows // LANES)]


def buffer_bytes(buffers: Any) -> int:
    """Returns the bytes of all arrays, or VMEM buffers, in a tree, less semaphores."""
    total = 0
    for x in jax.tree.leaves(buffers):
        if jnp.issubdtype(x.dtype, jnp.number):
            total += math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
    return total


def flat_index(operands: NamedTuple, field: str) -> int:
    """Returns the number of a field's first array, for `input_output_aliases`."""
    return len(jax.tree.leaves(operands[: operands._fields.index(field)]))
