"""Matmuls, layouts of one number a row, and bytes of the TPU kernels' arrays."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ..precision import LOG2_E
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


class SoftCap(NamedTuple):
    """Caps scores: s becomes limit * tanh(s / limit).

    limit: log2(e) times the soft cap, as scores are exponents of 2.
    offset: what scores come out less: `limit`, or 0 where that is faster.
    has_tanh: whether the chip's own tanh is exact, as from v6e on. On older ones XLA's
      tests allow it an error of 5e-4. There tanh(x) is 1 - 2 / (1 + exp(2 x)), whose 1
      the offset takes away: a subtraction less for the VPU.
    newton_steps: of that reciprocal.
    """

    limit: float
    offset: float
    has_tanh: bool
    newton_steps: int

    @classmethod
    def of(
        cls, soft_cap: float, chip: pltpu.TpuInfo, dtype: jnp.dtype, has_slope: bool
    ) -> "SoftCap":
        """Returns the cap for a chip.

        dtype: of q, whose digits it keeps. has_slope: whether `slope` is needed.

        Raises:
          NotImplementedError: its square, or its error, is too large.
        """
        if not 2**-10 <= soft_cap <= 2**10:
            raise NotImplementedError(
                f"soft_cap must be from 1/1024 to 1024 on a TPU, got {soft_cap}: name "
                "another implementation, or leave out a cap that no score reaches"
            )
        limit, has_tanh = soft_cap * LOG2_E, chip.generation >= 6
        offset = 0.0 if has_tanh and not has_slope else limit
        return cls(limit, offset, has_tanh, 2 if dtype == jnp.float32 else 1)

    def apply(self, scale: float, x: jax.Array) -> jax.Array:
        """Returns capped scores, less `offset`, of products x: [m, n], float32."""
        scale /= self.limit
        if self.has_tanh:
            return self.limit * jnp.tanh(scale * x) - self.offset
        # At most 2^100: a Newton step from 1 / inf gives nan.
        exp = jnp.exp2(jnp.minimum(2 * LOG2_E * scale * x, 100.0))  # [m, n]
        return -2 * self.limit * reciprocal(1.0 + exp, self.newton_steps)

    def slope(self, s: jax.Array) -> jax.Array:
        """Returns limit^2 (1 - tanh^2) at capped scores s less `limit`: [m, n]."""
        return s * (-2 * self.limit - s)


class TileConfig(NamedTuple):
    """Constants of a kernel.

    blocks: what its tiles are cut into.
    scale: log2(e) times the factor on scores, which are exponents of 2 in the kernels.
    precision: of the matmuls.
    soft_cap: of the scores, if any.
    """

    blocks: TpuBlocks
    scale: float
    precision: lax.Precision
    soft_cap: SoftCap | None

    def scores(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Returns scaled and capped scores: [m, D], [n, D] -> [m, n], float32."""
        x = dot(a, b, NT, self.precision)
        return self.soft_cap.apply(self.scale, x) if self.soft_cap else self.scale * x


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
