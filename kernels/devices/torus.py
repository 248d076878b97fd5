"""Rings of neighbours: in which order a ring visits chips that stand in a box.

A ring's devices hand arrays from each to the next. Where chips stand on a torus or a
grid, the order in which they are numbered jumps at the end of every row, and so do the
transfers, over links that others need too: XLA for v5e then does not even start them
ahead of the work that should hide them. A closed walk has no jumps: around a box wider
than one chip, with an even side, or along a whole axis that is closed itself.

A ring that is two axes of a mesh has gathers within its parts, and sums over what has
the same place in them. XLA for v5e routes these only where the parts are boxes, each
walked like the others: rows there and back, which is closed where the torus is, as it
is along 16 chips of v5e and v6e and along multiples of 4 of v4 and v5p.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

Coords = tuple[int, ...]
WRAPS_FROM = dict.fromkeys(("TPU v4", "TPU v5", "TPU v5p", "TPU7x"), 4)
WRAPS_FROM |= dict.fromkeys(("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e"), 16)
"""Kinds of device whose axes of multiples of this many chips are closed: of a 3D torus
only if all axes are (docs.cloud.google.com/tpu/docs). No slice of a v3 pod has any."""
Shape = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]


def wraps(device_kind: str, shape: Shape) -> tuple[bool, ...]:
    """Returns which of three axes of a slice of these chips are closed."""
    step = WRAPS_FROM.get(device_kind, 0)
    # Slices of v5e and v6e have two axes: the third has one chip.
    sides = shape[:2] if step == 16 else shape
    if not step or (len(sides) == 3 and any(side % step for side in sides)):
        return False, False, False
    return tuple(side % step == 0 for side in (*sides, 1, 1)[:3])


def ring_along(devices: np.ndarray, axis: int, *, parts: int = 1) -> np.ndarray:
    """Reorders devices of a mesh along one axis so that it is a closed walk.

    devices: of the mesh; all lines along `axis` are reordered alike. Those that do not
      know their place, as CPUs and GPUs, and lines that are no box stay as they are.
    parts: into which the ring is cut, one after the other; if several, they are boxes
      where the longest side divides into them evenly.
    """
    coords = coords_of_all(lines_along(devices, axis)[0])
    if coords is None:
        return devices
    return np.take(devices, closed_walk(coords, by_rows=parts > 1), axis=axis)


def is_closed(devices: np.ndarray, axis: int) -> bool:
    """Returns whether lines along `axis` go from each chip to one beside it, and back.

    True also if devices do not know their place. All lines are alike.
    """
    coords = coords_of_all(lines_along(devices, axis)[0])
    return coords is None or len(coords) == 1 or _is_closed(coords)


def lines_along(devices: np.ndarray, axis: int) -> np.ndarray:
    """Returns the lines of a mesh's devices along an axis, a row each."""
    return np.moveaxis(devices, axis, -1).reshape(-1, devices.shape[axis])


def pairs_along(devices: np.ndarray, axis: int) -> tuple[Groups, Groups] | None:
    """Groups the devices of an axis by pairs of neighbours, and by places in the pairs.

    devices: of a mesh; of its lines along `axis` the first and the second are a pair,
      and so on, as in rings that are closed walks.

    Returns:
      Numbers in each line of all lower ends of pairs and of all upper ends; and of both
      of each pair. None where devices know no place, or pairs do not all lie alike.
    """
    lines = lines_along(devices, axis)
    first, *others = (_pairs(coords_of_all(line)) for line in lines)
    return first if all(other == first for other in others) else None


def _pairs(coords: Sequence[Coords] | None) -> tuple[Groups, Groups] | None:
    """Groups one line as `pairs_along`."""
    if not coords or len(coords) % 2 or len(set(coords)) < len(coords):
        return None
    pairs = [(i, i + 1) for i in range(0, len(coords), 2)]
    ends = [sorted(pair, key=coords.__getitem__) for pair in pairs]
    ways = {tuple(np.subtract(coords[b], coords[a])) for a, b in ends}
    if len(ways) > 1 or sum(*ways) != 1:
        return None
    return tuple(zip(*ends, strict=True)), tuple(pairs)


def coords_of(device: jax.Device) -> Coords | None:
    """Returns a TPU core's coordinates: of its chip, and which of its cores.

    None for others: a GPU's are the numbers of its host and in it, and no torus.
    """
    chip = getattr(device, "coords", None)
    if chip is None or device.platform != "tpu":
        return None
    return (*chip, getattr(device, "core_on_chip", 0))


def coords_of_all(devices: Iterable[jax.Device]) -> list[Coords] | None:
    """Returns the coordinates of all devices; None if one does not know its own."""
    coords = []
    for device in devices:
        chip = coords_of(device)
        if chip is None:
            return None
        coords.append(chip)
    return coords


def in_boxes(
    shape: Sequence[int], devices: Sequence[jax.Device], axis: int
) -> np.ndarray | None:
    """Lays a mesh out in boxes of `shape[axis]` chips, around which there is a walk.

    Chips of a box are next to each other; the axes of the mesh before and after `axis`
    go over the boxes, the last in the shortest steps.

    shape: devices along each axis of the mesh. axis: of its rings, as `ring_along`.

    Returns:
      The devices (*shape), or None where they do not fill a box, or no such box of
      them has an even side.
    """
    coords = coords_of_all(devices)
    numbers = None if coords is None else _box(coords)
    if numbers is None:
        return None
    every = _boxes(numbers.shape, tuple(shape), axis)
    cuts = min(every, default=None, key=lambda cuts: _extents(cuts, axis))
    if cuts is None:
        return None
    # Chips of a box are next to each other: the last, fastest part of each side.
    ranks = len(shape)
    nested = [i for i in range(ranks) if i != axis] + [axis]
    grid = np.array(devices, object)[numbers]
    grid = grid.reshape([cut[i] for cut in cuts for i in nested])
    order = [
        side * ranks + nested.index(i)
        for i in range(ranks)
        for side in range(len(cuts))
    ]
    return grid.transpose(order).reshape(shape)


def _box(coords: Sequence[Coords]) -> np.ndarray | None:
    """Returns the numbers of chips by side; None where they do not fill a box."""
    sides = [sorted(set(side)) for side in zip(*coords, strict=True)]
    numbers = np.full([len(side) for side in sides], -1)
    for number, chip in enumerate(coords):
        at = tuple(side.index(x) for side, x in zip(sides, chip, strict=True))
        numbers[at] = number  # two chips in one place leave another place at -1
    return numbers if numbers.size == len(coords) and numbers.min() >= 0 else None


def _boxes(
    lengths: Sequence[int], shape: Shape, axis: int
) -> Iterator[tuple[Shape, ...]]:
    """Lists the ways to cut each side over the mesh's axes, with boxes along `axis`.

    The factors of a side multiply to its length, those of an axis to its devices.
    """
    sides = []
    for length in lengths:
        common = [math.gcd(length, n) for n in shape]
        ways = itertools.product(*map(_divisors, common))
        sides.append([cut for cut in ways if math.prod(cut) == length])
    for cuts in itertools.product(*sides):
        box = [cut[axis] for cut in cuts]
        # A closed walk around it needs an even side, and another to come back on.
        is_wide = any(n % 2 == 0 for n in box) and sum(n > 1 for n in box) > 1
        is_whole = tuple(map(math.prod, zip(*cuts, strict=True))) == shape
        if is_whole and (is_wide or shape[axis] == 2):
            yield cuts


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _extents(cuts: Sequence[Shape], axis: int) -> tuple[int, ...]:
    """Counts the links from the first to the last device of each axis of the mesh.

    Of the axis after the ring's first, then of the longest side of a box, so that what
    is sent most often has the shortest way.
    """
    ranks = len(cuts[0])
    inside = [[cut[axis] for cut in cuts]]  # chips that a step goes past, by side
    links = []
    for i in reversed([i for i in range(ranks) if i != axis]):
        steps = inside[-1]
        lengths = [cut[i] for cut in cuts]
        links.append(sum((n - 1) * m for n, m in zip(lengths, steps, strict=True)))
        inside.append([n * m for n, m in zip(lengths, steps, strict=True)])
    return links[0], max(inside[0]), *links[1:]


def closed_walk(coords: Sequence[Coords], *, by_rows: bool = False) -> list[int]:
    """Numbers of the chips in an order in which each is a neighbour of the last.

    coords: all of a box, in any order, else they are left as they are. The last is a
      neighbour of the first too, if a side of the box is even and another longer than
      1. In one row, the way back takes the links that others do not, the other way.
    by_rows: whether it goes along the longest side once, row by row, and closes only
      around a torus.
    """
    numbers = _box(coords)
    if numbers is None:
        return list(range(len(coords)))
    walk = _rows(numbers.shape) if by_rows else _walk(numbers.shape)
    return [int(numbers[chip]) for chip in walk]


def _walk(shape: Shape) -> list[Coords]:
    """Walks through a box and back, in pairs along one side where that can be."""
    for side in reversed(range(len(shape))):
        walk = _in_pairs(shape, side)
        if walk is not None and _is_closed(walk):
            return walk
    return _loop(shape)


def _in_pairs(shape: Shape, side: int) -> list[Coords] | None:
    """Walks through a box of half this side; each place there is two here."""
    if shape[side] % 2:
        return None
    walk: list[Coords] = []
    for *at, half in _loop((*shape[:side], *shape[side + 1 :], shape[side] // 2)):
        pair = [(*at[:side], 2 * half + i, *at[side:]) for i in range(2)]
        # Begin beside the chip at which the pair before has ended.
        if walk and not _is_closed([walk[-1], pair[0]]):
            pair.reverse()
        walk += pair
    return walk


def _is_closed(walk: Sequence[Coords]) -> bool:
    """Returns whether each place is beside the next, and the last beside the first."""
    return bool((np.abs(np.subtract(walk, np.roll(walk, 1, 0))).sum(1) == 1).all())


def _loop(shape: tuple[int, ...]) -> list[Coords]:
    """Walks through a box and back: there in serpentines, back along one edge."""
    is_even = [side % 2 == 0 for side in shape]
    if not any(is_even):
        return _serpentine(shape)  # no walk of an odd number of steps is closed
    even = is_even.index(True)
    edge, *others = _serpentine(shape[:even] + shape[even + 1 :])
    rows = range(shape[even])
    walk = []
    for row in rows:
        columns = others if row % 2 == 0 else reversed(others)
        walk += [(row, column) for column in columns]
    walk += [(row, edge) for row in (reversed(rows) if others else rows)]
    return [(*at[:even], row, *at[even:]) for row, at in walk]


def _rows(shape: tuple[int, ...]) -> list[Coords]:
    """Returns the snake order whose rows share their place on the longest side."""
    first = shape.index(max(shape))
    turned = _serpentine((shape[first], *shape[:first], *shape[first + 1 :]))
    return [(*at[1 : first + 1], at[0], *at[first + 1 :]) for at in turned]


def _serpentine(shape: tuple[int, ...]) -> list[Coords]:
    """Lists every place of a box, each a neighbour of the one before."""
    if not shape:
        return [()]
    inner = _serpentine(shape[1:])
    return [
        (i, *chip)
        for i in range(shape[0])
        for chip in (inner if i % 2 == 0 else reversed(inner))
    ]
