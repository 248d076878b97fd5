"""Layouts: the assignment of a sequence's tokens to the shards of a ring.

A layout answers two questions, for a ring of N shards of L slots each:

- `index(shard)`: the global index of every local slot, increasing;
- `count(shard, g)`: how many of the shard's tokens have an index below g.

`count` maps the interval of key indices that a query attends to, [k_start, k_end), to
one of a shard's slots, [count(k_start), count(k_end)): that is all that kernels and
ring know of layouts.
Everything here takes and returns NumPy arrays or JAX arrays, and `shard` may be traced
(`lax.axis_index`).
"""

import math
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .checks import whole_number
from .visible import Array

Number = int | Array

LONGEST = int(np.iinfo(np.int32).max)
"""Tokens of a sequence at most, as its indices are int32."""


class Layout(Protocol):
    """Interface of a layout."""

    def index(self, shard: Number, ring_size: int, shard_length: int) -> Array:
        """Returns the global index of every slot of `shard`: int32 (L,), increasing."""

    def count(
        self, shard: Number, bound: Array, ring_size: int, shard_length: int
    ) -> Array:
        """Counts the tokens of `shard` with an index below `bound` (any shape)."""

    def divisor(self, ring_size: int) -> int:
        """Returns the number that a sequence's length must be a multiple of."""


@dataclass(frozen=True)
class Contiguous:
    """Layout in which shard d holds the tokens d·L … (d + 1)·L - 1 (2310.01889)."""

    def index(self, shard: Number, ring_size: int, shard_length: int) -> Array:
        return shard * shard_length + _slots(shard, shard_length)

    def count(
        self, shard: Number, bound: Array, ring_size: int, shard_length: int
    ) -> Array:
        return (bound - shard * shard_length).clip(0, shard_length)

    def divisor(self, ring_size: int) -> int:
        return ring_size


@dataclass(frozen=True)
class Striped:
    """Layout that assigns blocks of `granule` tokens to the shards round-robin.

    Striped Attention (2311.09431) has granule 1. In-context RL assigns whole steps.
    """

    granule: int = 1

    def __post_init__(self):
        whole_number("striped granule", self.granule, 1)

    def index(self, shard: Number, ring_size: int, shard_length: int) -> Array:
        slot = _slots(shard, shard_length)
        block = slot // self.granule
        return (block * ring_size + shard) * self.granule + slot % self.granule

    def count(
        self, shard: Number, bound: Array, ring_size: int, shard_length: int
    ) -> Array:
        # Whole rounds before the bound, and what the last one has of the shard's block.
        period = ring_size * self.granule  # tokens between two blocks of a shard
        rest = (bound % period - shard * self.granule).clip(0, self.granule)
        return (bound // period * self.granule + rest).clip(0, shard_length)

    def divisor(self, ring_size: int) -> int:
        return ring_size * self.granule


@dataclass(frozen=True)
class Zigzag:
    """Layout in which shard d holds the chunks d and 2N - 1 - d of 2N chunks."""

    def index(self, shard: Number, ring_size: int, shard_length: int) -> Array:
        chunk = shard_length // 2
        slot = _slots(shard, shard_length)
        late = (2 * ring_size - 2 - 2 * shard) * chunk  # tokens between the two chunks
        return shard * chunk + slot + (slot >= chunk).astype(slot.dtype) * late

    def count(
        self, shard: Number, bound: Array, ring_size: int, shard_length: int
    ) -> Array:
        chunk = shard_length // 2
        late = 2 * ring_size - 1 - shard  # number of the second chunk
        # All tokens of the first chunk come before those of the second: both counts
        # together are the slot at which the bound lies.
        early = (bound - shard * chunk).clip(0, chunk)
        return early + (bound - late * chunk).clip(0, chunk)

    def divisor(self, ring_size: int) -> int:
        return 2 * ring_size


@dataclass(frozen=True)
class Mirror:
    """Layout in which shard d holds the chunks 2d and 2N - 1 - 2d of 2N chunks.

    The shards of `Zigzag` on other devices, as balanced. Half of each is where it is in
    natural order, and devices d and N - 1 - d swap the other half (see `ring.natural`).
    """

    def index(self, shard: Number, ring_size: int, shard_length: int) -> Array:
        same = _shard_of_zigzag(shard, ring_size)
        return Zigzag().index(same, ring_size, shard_length)

    def count(
        self, shard: Number, bound: Array, ring_size: int, shard_length: int
    ) -> Array:
        same = _shard_of_zigzag(shard, ring_size)
        return Zigzag().count(same, bound, ring_size, shard_length)

    def divisor(self, ring_size: int) -> int:
        return 2 * ring_size


def _shard_of_zigzag(shard: Number, ring_size: int) -> Number:
    """Returns the shard of `Zigzag` that holds the tokens of this one of `Mirror`."""
    even = 2 * shard
    odd = 2 * ring_size - 1 - even
    if isinstance(shard, int):
        return min(even, odd)  # NumPy would make it, and so indices, 64 bits wide
    xp = jnp if isinstance(shard, jax.Array) else np
    return xp.minimum(even, odd)


def order(
    layout: Layout, ring_size: int, length: int, part: tuple[int, int] | None = None
) -> np.ndarray:
    """Returns global indices in layout order, shard after shard: int32 (length,).

    part: half-open range of slots to return; only the shards that hold them are
      computed. None: all of them.

    Raises:
      ValueError: `length` does not divide into the layout's shards, or `part` is not
        within it.
    """
    check_length(layout, ring_size, length)
    first, stop = (0, length) if part is None else part
    if not 0 <= first <= stop <= length:
        raise ValueError(
            f"part must be slots of a sequence of {length} tokens, got {part}"
        )
    size = length // ring_size
    shards = range(first // size, -(-stop // size)) if first < stop else range(0)
    wholes = [np.asarray(layout.index(shard, ring_size, size)) for shard in shards]
    if not wholes:
        return np.zeros(0, np.int32)
    skipped = first - shards[0] * size
    return np.concatenate(wholes)[skipped : skipped + stop - first]


def permute(x: Array, layout: Layout, ring_size: int, axis: int = 1) -> Array:
    """Puts a sequence into layout order, so that equal slices of it are the shards.

    Raises:
      ValueError: x has no such axis, or its length does not divide into shards.
    """
    axis = _checked_axis(x, axis)
    return _take(x, order(layout, ring_size, x.shape[axis]), axis)


def unpermute(x: Array, layout: Layout, ring_size: int, axis: int = 1) -> Array:
    """Undoes `permute`."""
    axis = _checked_axis(x, axis)
    return _take(x, np.argsort(order(layout, ring_size, x.shape[axis])), axis)


def divisor(
    layout: Layout, ring_size: int, slices: int = 1, natural_order: bool = False
) -> int:
    """Returns the number that a sequence's length must be a multiple of.

    slices: equal ones into which each shard is cut in its turn (see `ulysses`).
    natural_order: whether devices make the shards of contiguous slices (see
      `ring.natural`).
    """
    least = layout.divisor(ring_size)
    if natural_order and isinstance(layout, Striped):
        least *= ring_size  # every slice holds blocks of all shards, as many of each
    return math.lcm(least, ring_size * slices)


def padded_length(
    layout: Layout,
    ring_size: int,
    length: int,
    slices: int = 1,
    natural_order: bool = False,
) -> int:
    """Returns the smallest length from `length` on that can be sharded.

    slices, natural_order: as in `divisor`.

    Raises:
      ValueError: the layout or a number is not one, or indices of that length do not
        fit into int32.
    """
    _check_sizes(layout, ring_size, length, slices)
    step = divisor(layout, ring_size, slices, natural_order)
    padded = -(-length // step) * step
    if padded > LONGEST:
        raise ValueError(
            f"{length:,} tokens over {ring_size} shards of {layout} would be padded to "
            f"{padded:,}, and a sequence has at most {LONGEST:,}: choose fewer tokens, "
            "or a smaller granule of stripes"
        )
    return padded


def check_length(
    layout: Layout,
    ring_size: int,
    length: int,
    slices: int = 1,
    natural_order: bool = False,
) -> None:
    """Checks that a sequence can be cut into the shards of a layout.

    slices, natural_order: as in `divisor`.

    Raises:
      ValueError: the layout or ring size is not one, or `length` does not divide.
    """
    _check_sizes(layout, ring_size, length, slices)
    if natural_order and not isinstance(layout, Contiguous | Mirror | Striped | Zigzag):
        raise ValueError(
            "layout must be Contiguous, Mirror, Striped or Zigzag where "
            f"natural_order=True, got {layout!r}: permute the sequence on the host"
        )
    step = divisor(layout, ring_size, slices, natural_order)
    if length % step:
        padded = padded_length(layout, ring_size, length, slices, natural_order)
        cut = f" in {slices} slices each" if slices > 1 else ""
        made = ", made of slices in natural order" if natural_order else ""
        raise ValueError(
            f"a sequence of {length} tokens does not divide into {ring_size} shards "
            f"of {layout}{cut}{made}: pad it to {padded}, a multiple of {step} "
            "(see padded_length and the mask padding)"
        )


def check_layout(layout: Layout) -> None:
    """Refuses a layout's class, or its name."""
    if isinstance(layout, type) or not hasattr(layout, "divisor"):
        raise ValueError(
            "layout must be a layout, as Striped(), Contiguous() or Zigzag(), got "
            f"{layout!r}"
        )


def _check_sizes(layout: Layout, ring_size: int, length: int, slices: int) -> None:
    check_layout(layout)
    whole_number("ring_size", ring_size, 1)
    whole_number("the sequence's length", length, 0)
    whole_number("slices", slices, 1)


def _slots(shard: Number, shard_length: int) -> Array:
    xp = jnp if isinstance(shard, jax.Array) else np
    return xp.arange(shard_length, dtype=xp.int32)


def _checked_axis(x: Array, axis: int) -> int:
    """Returns an axis counted from the first."""
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{axis=} must be the tokens' axis of an array {x.shape}: give axis=0 for "
            "tokens alone, (T,)"
        )
    return axis % x.ndim


def _take(x: Array, indices: np.ndarray, axis: int) -> Array:
    if isinstance(x, np.ndarray):
        return np.take(x, indices, axis)
    # A permutation has no index outside: by default JAX looks for some, to put nan in
    # their place.
    sharding = jax.typeof(x).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jnp.take(x, indices, axis, unique_indices=True, mode="clip")
    taken = x.at[(*(slice(None),) * axis, indices)]
    return taken.get(unique_indices=True, mode="clip", out_sharding=sharding)
