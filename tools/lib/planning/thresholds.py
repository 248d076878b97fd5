"""Thresholds: from which length of its shards on a ring hides its transfers.

With one causal document in a row, striped. Estimated, like all times of the planner.
"""

import functools
import itertools
from dataclasses import replace

from kernels.device import kernel_cores
from kernels.layouts import Striped
from kernels.schedule import Route, Walk, default_walks
from tools.lib.planning.kernels import FLOAT32, LANES, Kernels
from tools.lib.planning.ring import Ring
from tools.lib.planning.ring_steps import Sequence
from training.chips import Chip
from training.cycles import cycles_of_torus

KI = 1024

QUERY_HEADS, BFLOAT16 = 32, 2

TORI = {"2 cycles": (16, 16), "3 cycles": (4, 4, 4)}
"""Chips along each side of a torus with as many disjoint cycles."""

ROUTES = ("one way", "both ways", *TORI)


def threshold(chip: Chip, route: str, kv_heads: int) -> float | None:
    """Returns the tokens of a shard from which a ring's transfers are hidden.

    route: of ROUTES. kv_heads: of a device, for QUERY_HEADS of LANES numbers.
    """
    around = default_walks(64)
    sizes = {"one way": (64, around[:1]), "both ways": (64, around)}
    size, walks = sizes.get(route) or _on_cycles(TORI[route])
    numbers = 2 * KI * kv_heads * LANES
    ring = Ring(
        sequence=Sequence(Striped(), size, KI),
        rows=1,
        heads=QUERY_HEADS,
        kv_heads=kv_heads,
        head_dim=LANES,
        dtype="bfloat16",
        keys_bytes=numbers * BFLOAT16,
        gradients_bytes=numbers * FLOAT32,
        route=Route(walks, cores=kernel_cores(chip.device_kinds[0])),
        turns=1 + chip.name.startswith("TPU"),
    )
    return hides_from(ring, chip)


@functools.cache
def hides_from(ring: Ring, chip: Chip) -> float | None:
    """Returns `Ring.hides_from` of the kernels of a chip."""
    return ring.hides_from(Kernels.of(chip))


def of_one_row(ring: Ring) -> Ring:
    """Returns a ring of KI tokens and one row, which hides as others of any rows."""
    one = ring.at(KI)
    keys, gradients = (x / ring.rows for x in (one.keys_bytes, one.gradients_bytes))
    return replace(one, rows=1, keys_bytes=keys, gradients_bytes=gradients)


def _on_cycles(torus: tuple[int, ...]) -> tuple[int, tuple[Walk, ...]]:
    """Returns the chips of a torus, and its disjoint cycles both ways."""
    walks = [Walk(cycle) for cycle in cycles_of_torus(torus)]
    ways = itertools.chain.from_iterable((walk, walk.back()) for walk in walks)
    return walks[0].length, tuple(ways)
