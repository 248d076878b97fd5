"""Which way scores and accumulators lie in vector registers."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .vector import LANES, SUBLANES, broadcast_lanes, column_to_row, dot, row_to_column


@dataclass(frozen=True)
class Orientation:
    """Axis of the query rows, or in an accumulator over rows of the keys: 0 or 1.

        axis 0   S [rows, keys]     accumulators [rows, D]
                 numbers and sums of rows: [rows, 128], equal lanes or lane by lane
        axis 1   S^T [keys, rows]   accumulators [D, rows]
                 numbers of rows [1, rows], sums [8, rows], sublane by sublane

    A product whose result is D = 128 numbers wide fills half of a matrix unit 256 wide,
    as from v6e on: there D streams through it instead, along the sublanes.
    """

    axis: int

    @classmethod
    def of(cls, chip: pltpu.TpuInfo, depth: int) -> "Orientation":
        """Returns the faster one for heads of D numbers."""
        return cls(int(depth < chip.mxu_column_size))

    @property
    def keys_axis(self) -> int:
        """Axis of the keys in scores, and of D in accumulators."""
        return 1 - self.axis

    @property
    def sum_width(self) -> int:
        """Numbers of a sum over keys that is not reduced yet."""
        return SUBLANES if self.axis else LANES

    @property
    def number_width(self) -> int:
        """Times that one number of a row is repeated."""
        return 1 if self.axis else LANES

    def ordered(self, rows: Any, others: Any) -> tuple[Any, Any]:
        """Returns both, those of the rows in the place of their axis."""
        return (others, rows) if self.axis else (rows, others)

    def at(self, x_ref: jax.Ref, rows: pl.Slice) -> jax.Ref:
        """Returns some rows."""
        return x_ref.at[self.ordered(rows, slice(None))]

    def swap(self, x: jax.Array) -> jax.Array:
        """Turns [..., rows, D] into accumulators, and back."""
        return x.swapaxes(-1, -2) if self.axis else x

    def product(
        self,
        a: jax.Array,
        b: jax.Array,
        contracted: tuple[int, int],
        precision: lax.Precision,
    ) -> jax.Array:
        """Returns `dot` of a, whose other axis are rows, and b: scores, or P V."""
        return dot(*self.ordered(a, b), self.ordered(*contracted), precision)

    def widen(self, x: jax.Array, width: int) -> jax.Array:
        """Repeats numbers of rows, to meet as many keys or D; axis 1 broadcasts."""
        return x if self.axis else broadcast_lanes(x, width)

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
