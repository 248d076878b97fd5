"""Choice: the route that the rings of a step take, beside the others that they could.

A ring goes both ways round between TPUs, or on disjoint cycles where its torus has
them and its shards are short, and one way between GPUs. What it takes is estimated;
and so are the others, to name one that would be faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kernels.schedule import Route, Walk, default_walks
from tools.lib.planning.kernels import Kernels
from tools.lib.planning.ring import Ring, Times
from tools.lib.planning.thresholds import KI, hides_from, of_one_row

FASTER = 0.99
"""Share of a route's time from which on another one is named."""


@dataclass(frozen=True)
class Choice:
    """Routes of a step's rings, and seconds of a device.

    route: of each kind of layers: what it is, and from which shards on it hides its
      transfers, or what it leaves out. hiding: see `Times`, the least of all rings.
    kernels, outlasting: of a step. routes: their sum, by each route that whole shards
      could take.
    """

    route: str
    hiding: float | None
    kernels: float
    outlasting: float
    routes: dict[str, float]

    @classmethod
    def of(cls, passes: Sequence[tuple[int, Ring, str]], kernels: Kernels) -> "Choice":
        """Estimates the rings of a step: see `estimate.ring_passes`."""
        rings = list({ring: None for _, ring, way in passes if way == "backward"})
        known = _Known(kernels)
        spent, outlasting = known.seconds(passes)
        routes = {}
        if cut := next(filter(is_free, rings), None):
            # A ring that counts has no walks; only TPUs take turns.
            ways = cut.route.walks or default_walks(cut.steps)[: cut.turns]
            for walks in dict.fromkeys(((), ways[:2], ways)):
                other = [(count, on(ring, walks), way) for count, ring, way in passes]
                routes[on(cut, walks).describe()] = sum(known.seconds(other))
            routes[cut.describe()] = spent + outlasting
        told = dict.fromkeys(f"{one.describe()}: {why(one, kernels)}" for one in rings)
        best = min(routes, key=routes.__getitem__, default="")
        if routes and routes[best] < FASTER * (spent + outlasting):
            told[f"{best} would take {routes[best] / (spent + outlasting):.0%}"] = None
        least = [known.times(ring, way).hiding for _, ring, way in passes]
        return cls(
            route="; ".join(told),
            hiding=min((one for one in least if one is not None), default=None),
            kernels=spent,
            outlasting=outlasting,
            routes=routes,
        )


@dataclass
class _Known:
    """Times of rings, each estimated once."""

    kernels: Kernels
    found: dict[tuple[Ring, str], Times] = field(default_factory=dict)

    def times(self, ring: Ring, direction: str) -> Times:
        if (ring, direction) not in self.found:
            self.found[ring, direction] = ring.times(self.kernels, direction)
        return self.found[ring, direction]

    def seconds(self, passes: Sequence[tuple[int, Ring, str]]) -> tuple[float, float]:
        """Returns those of kernels, and of transfers that outlast them."""
        found = [(count, self.times(ring, way)) for count, ring, way in passes]
        return (
            sum(count * one.kernels for count, one in found),
            sum(count * one.outlasting for count, one in found),
        )


def on(ring: Ring, walks: tuple[Walk, ...]) -> Ring:
    """Returns a ring of whole shards on these walks; as it is, if it sends less."""
    if not is_free(ring):
        return ring
    return replace(ring, route=Route(walks, cores=ring.route.cores), count=None)


def is_free(ring: Ring) -> bool:
    """Returns whether all of every shard could visit every device."""
    if ring.steps == 1:
        return False
    pieces = ring.once("forward").schedule.pieces
    is_whole = all(len(piece.visits) == ring.steps for piece in pieces)
    return is_whole or ring.route.is_counted


def why(ring: Ring, kernels: Kernels) -> str:
    """Says what a ring's route needs, or leaves out, in a few words."""
    if ring.steps == 1:
        return "devices have whole rows"
    if ring.route.is_counted:
        return "the longest document ends it"
    if is_free(ring):
        tokens = hides_from(of_one_row(ring), kernels.chip)
        if tokens is None:
            return "transfers outlast kernels"
        return f"hides from {tokens / KI:.1f} Ki" if tokens else "hides at any length"
    done = ring.once("forward")
    others = [piece for piece in done.schedule.pieces if piece.first]
    shards = sum(done.share(piece) * len(piece.visits) for piece in others)
    return f"read {shards * ring.sequence.length:,.0f} tokens of others"
