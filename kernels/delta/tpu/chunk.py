"""A chunk of the gated delta rule in registers: its decays, its inverse, its products.

Products are float32 to the last digits. An operand in bfloat16 is exact in one pass of
the MXU, one in float32 is three of them: `product` takes 1, 3 or 6 passes.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from ...backends.tpu.vector import NN, NT, dot

SUBLANES = 8

BARRIER = -1e30
"""The log decay of a document's first token: it sees no state before it."""

_HIGH = -(2**16)
"""Mask of the bits of a float32 that a bfloat16 holds."""


def split(x: jax.Array, parts: int) -> list[jax.Array]:
    """Returns bfloat16 parts of x that sum up to it; three hold every digit."""
    if x.dtype == jnp.bfloat16:
        return [x]
    pieces = []
    for _ in range(parts - 1):
        # By bits: compilers may leave out that a number is rounded and widened again.
        high = lax.bitcast_convert_type(x, jnp.int32) & _HIGH
        high = lax.bitcast_convert_type(high, jnp.float32)
        pieces.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*pieces, x.astype(jnp.bfloat16)]


def product(
    a: jax.Array, b: jax.Array, contracted: tuple[int, int] = NN, parts: int = 3
) -> jax.Array:
    """Multiplies two matrices, of bfloat16 or float32, to float32.

    parts: bfloat16 numbers that a float32 operand is worth.
    """
    a_parts = split(a, parts)
    b_parts = split(b, parts)
    left = []
    right = []
    # The smallest first, and none that is below the digits that are kept.
    for order in reversed(range(parts)):
        for n, part in enumerate(a_parts):
            if 0 <= order - n < len(b_parts):
                left.append(part)
                right.append(b_parts[order - n])
    # Side by side they are one long sum, which fills an MXU 256 deep.
    left = jnp.concatenate(left, axis=contracted[0])
    right = jnp.concatenate(right, axis=contracted[1])
    return dot(left, right, contracted, lax.Precision.DEFAULT)


class Triangles(NamedTuple):
    """Masks [C, C] of row i and column j, and the rows."""

    row: jax.Array  # i
    at_most: jax.Array  # j <= i
    before: jax.Array  # j < i
    diagonal: jax.Array  # j = i

    @classmethod
    def of(cls, size: int) -> "Triangles":
        """Returns the masks of C tokens."""
        row = lax.broadcasted_iota(jnp.int32, (size, size), 0)  # [C, C]
        column = lax.broadcasted_iota(jnp.int32, (size, size), 1)  # [C, C]
        return cls(row, column <= row, column < row, column == row)

    def column(self, row: jax.Array) -> jax.Array:
        """Turns numbers of tokens [1, C] into [C, 1]."""
        return jnp.where(self.diagonal, row, 0.0).sum(axis=1, keepdims=True)


class Gates(NamedTuple):
    """What a head forgets and writes in a chunk.

    decay: of what token j wrote until token i reads it, 0 for j > i.
    kept: of the state before the chunk until token i. last: of what token i wrote until
    the chunk's end. beta: of token j, and as a column.
    """

    decay: jax.Array  # [C, C]
    kept: jax.Array  # [C, 1]
    last: jax.Array  # [C, 1]
    beta: jax.Array  # [1, C]
    beta_column: jax.Array  # [C, 1]

    @classmethod
    def of(cls, gates: jax.Ref, head: int, masks: Triangles) -> "Gates":
        """Returns a head's gates. gates: log decays and then betas, [2 G, C]."""
        group = gates.shape[0] // 2
        log_decay = gates[head : head + 1]  # [1, C]
        beta = gates[group + head : group + head + 1]  # [1, C]
        until = jnp.where(masks.at_most, log_decay, 0.0)  # [C, C], of tokens l <= i
        after = jnp.where(masks.at_most, 0.0, log_decay)  # [C, C], of tokens l > i
        # Summed for each pair: differences of long sums would lose digits.
        between = product(until, masks.before.astype(jnp.bfloat16))  # [C, C], l > j
        return cls(
            decay=jnp.where(masks.at_most, jnp.exp(between), 0.0),
            kept=jnp.exp(until.sum(axis=1, keepdims=True)),
            last=jnp.exp(after.sum(axis=1, keepdims=True)),
            beta=beta,
            beta_column=masks.column(beta),
        )

    @property
    def stays(self) -> jax.Array:
        """The factor on the state from the chunk's begin to its end, [1, 1]."""
        return self.kept[-1:]


def scores(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns products of queries, and of keys, with keys: [C, C] each."""
    both = product(jnp.concatenate([q, k]), k, NT)  # [2 C, C]
    return both[: len(q)], both[len(q) :]


def inverses(systems: list[jax.Array]) -> list[jax.Array]:
    """Returns (I + system)^-1 of strictly lower triangles [C, C], all in step.

    Blocks of 8 rows are solved by substitution, all of them at once, and then joined
    two by two: of [[a, 0], [c, b]] the inverse has -b^-1 c a^-1 in the corner. Powers
    of the system, whose sum the inverse is too, would cancel.
    """
    size = len(systems[0])
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)  # [C, C]
    column = lax.broadcasted_iota(jnp.int32, (size, size), 1)  # [C, C]
    is_own = row // SUBLANES == column // SUBLANES  # [C, C]
    solved = []
    for blocks in _solve_blocks(systems):
        tall = jnp.tile(blocks, (size // SUBLANES, 1))  # [C, C]
        solved.append(jnp.where(is_own, tall, 0.0))
    block = SUBLANES
    while block < size:
        is_corner = (row // block == column // block + 1) & (row // block % 2 == 1)
        corners = [jnp.where(is_corner, system, 0.0) for system in systems]  # [C, C]
        # The rows of second blocks alone: the first ones are done.
        lower = [_halves(x, block)[1] for x in solved]  # [C / 2, C]
        steps = [product(x, c) for x, c in zip(lower, corners, strict=True)]
        steps = [product(x, s) for x, s in zip(steps, solved, strict=True)]
        for n, step in enumerate(steps):
            upper = _halves(solved[n], block)[0]  # [C / 2, C]
            solved[n] = _joined(upper, lower[n] - step, block)  # [C, C]
        block *= 2
    return solved


def _halves(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns every other block of rows of x [C, C], and those between: [C / 2, C]."""
    blocks = [x[first : first + block] for first in range(0, len(x), block)]
    return jnp.concatenate(blocks[::2]), jnp.concatenate(blocks[1::2])


def _joined(upper: jax.Array, lower: jax.Array, block: int) -> jax.Array:
    """Undoes `_halves`."""
    blocks = []
    for first in range(0, len(upper), block):
        blocks.append(upper[first : first + block])
        blocks.append(lower[first : first + block])
    return jnp.concatenate(blocks)


def _solve_blocks(systems: list[jax.Array]) -> list[jax.Array]:
    """Inverts I + the blocks on the diagonals of [C, C], side by side: [8, C]."""
    size = len(systems[0])
    shape = SUBLANES, size
    row = lax.broadcasted_iota(jnp.int32, shape, 0)  # [8, C]
    column = lax.broadcasted_iota(jnp.int32, shape, 1)  # [8, C]
    own = column % SUBLANES  # [8, C]
    solved = [jnp.where(row == own, 1.0, 0.0) for _ in systems]  # [8, C]
    diagonals = []
    for system in systems:
        blocks = jnp.zeros(shape, jnp.float32)
        for first in range(0, size, SUBLANES):
            is_here = column // SUBLANES == first // SUBLANES
            strip = system[first : first + SUBLANES]  # [8, C]
            blocks = jnp.where(is_here, strip, blocks)  # [8, C]
        diagonals.append(blocks)
    for token in range(SUBLANES - 1):
        for n, blocks in enumerate(diagonals):
            # Of each block the column of this token, in all of the block's lanes.
            factor = jnp.where(own == token, blocks, 0.0)  # [8, C]
            for bit in (1, 2, 4):
                shift = size - bit if token & bit else bit
                factor = factor + pltpu.roll(factor, shift, 1)
            # It is done: rows after it, where `factor` is not 0, need it no more.
            solved[n] = solved[n] - factor * solved[n][token : token + 1]  # [8, C]
    return solved
