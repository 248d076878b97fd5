"""Reads the static schedule that the TPU's compiler made of a kernel, by region.

The schedule is a list of bundles, instructions that start together, one bundle a cycle
unless something stalls. The compiler writes it as text, and for every bundle how many
slots of each unit it fills. VLOAD includes FILL and VSTORE includes SPILL: registers
that did not fit and went to VMEM and back.

Branches and their targets cut the schedule into regions.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DUMP_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
    "--xla_jf_emit_annotations=true --xla_jf_dump_llo_pass_label_regex=^final_.*"
)
"""For LIBTPU_INIT_ARGS, before JAX is imported. The dump of all the compiler's passes
would take hundreds of MB a kernel, and 20 times as long as compiling it."""

# "  0x1c LB: >> { %1 = sst ... }": address, label, depth in loops, instructions.
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *:([ >]*)\{", re.MULTILINE)
_BRANCH = re.compile(r"sbr\.rel .*?target = \$region(\d+)")
_TARGET = re.compile(r"\bStart(?:/End empty)? region (\d+)")


@dataclass(frozen=True)
class Span:
    """Bundles [begin, end): the body of a loop, or a stretch that a branch skips."""

    begin: int
    end: int

    @property
    def bundles(self) -> int:
        return self.end - self.begin

    def holds(self, other: "Span") -> bool:
        return self.begin <= other.begin and other.end <= self.end


@dataclass(frozen=True)
class Region(Span):
    """Bundles from a branch or a label to the next one.

    depth: loops around it; the outermost is the one over the kernel's grid.
    inside: the smallest loop or skipped stretch that holds it.
    used: slots by unit, of all its bundles.
    """

    depth: int
    inside: Span
    used: dict[str, int]


@dataclass(frozen=True)
class Schedule:
    """Regions of a kernel, in order; slots: of one bundle, by unit."""

    regions: tuple[Region, ...]
    slots: dict[str, int]


@dataclass(frozen=True)
class Body:
    """Bundles that run once for one tile.

    place: the path through it, from the first to the last bundle with MXU work.
    bundles: of that path, and so the cycles of a tile before any stalls.
    used: slots by unit.
    mxu_bound: bundles that the MXU slots would fill by themselves.
    """

    place: Span
    bundles: int
    used: dict[str, int]
    mxu_bound: float

    @property
    def mxu_share(self) -> float:
        return self.mxu_bound / self.bundles

    @property
    def spills(self) -> int:
        """Registers written to VMEM and registers read back."""
        return self.used["VSTORE:SPILL"] + self.used["VLOAD:FILL"]


def read_schedule(bundles_text: str, utilization_text: str) -> Schedule:
    """Parses the files `*-final_bundles.txt` and
    `*-final_hlo-static-per-bundle-utilization.txt` of a kernel.

    Raises:
      ValueError: they do not belong together, or have another format.
    """
    rows, slots = _read_utilization(utilization_text)
    bundles = list(_read_bundles(bundles_text))
    if len(bundles) != len(rows):
        raise ValueError(f"{len(bundles)} bundles, but utilization of {len(rows)}")
    edges, spans = _read_branches(bundles)
    regions = []
    for begin, end in itertools.pairwise(sorted(edges)):
        span = Span(begin, end)
        used = (sum(column) for column in zip(*rows[begin:end], strict=True))
        regions.append(
            Region(
                begin,
                end,
                depth=bundles[begin][1],
                inside=min(
                    (outer for outer in spans if outer.holds(span)),
                    key=lambda outer: outer.bundles,
                ),
                used=dict(zip(slots, used, strict=True)),
            )
        )
    return Schedule(tuple(regions), slots)


def _read_utilization(text: str) -> tuple[list[list[int]], dict[str, int]]:
    """Returns the slots that each bundle uses, and the slots of a bundle by unit."""
    head, _, table = text.partition("== UTILIZATION:\n")
    lines = head.splitlines()
    if len(lines) != 3:
        raise ValueError(f"no table of utilization: it begins {text[:80]!r}")
    capacity = map(int, lines[2].split())
    slots = dict(zip(lines[1].split(", "), capacity, strict=True))
    rows = [[int(count) for count in row.split()] for row in table.splitlines() if row]
    if any(len(row) != len(slots) for row in rows):
        raise ValueError(f"rows of the utilization do not have columns {list(slots)}")
    return rows, slots


def _read_bundles(text: str) -> Iterator[tuple[str | None, int, str]]:
    """Yields label, depth and text of every bundle; comments may span lines."""
    starts = list(_BUNDLE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for match, end in zip(starts, ends, strict=True):
        yield match[1], match[2].count(">"), text[match.end() : end]


def _read_branches(
    bundles: Sequence[tuple[str | None, int, str]],
) -> tuple[set[int], set[Span]]:
    """Returns the edges of regions, and the spans of loops and skipped stretches.

    A loop ends before the branch that closes it: that and its delay slots, up to five
    bundles, are a region of their own. A few branches, outside of loops, have a target
    that is not marked: only their own place is an edge.
    """
    edges, spans = {0, len(bundles)}, {Span(0, len(bundles))}
    targets = {
        region: place
        for place, (_, _, text) in enumerate(bundles)
        for region in _TARGET.findall(text)
    }
    for place, (label, _, text) in enumerate(bundles):
        if label:
            edges.add(place)
        for region in _BRANCH.findall(text):
            target = targets.get(region, place)
            edges |= {place, target}
            spans.add(Span(*sorted((place, target))))
    return edges, spans


def bodies(schedule: Schedule) -> list[Body]:
    """Returns the bodies of tiles: of each loop or skipped stretch with MXU work.

    A body reaches from the first region with MXU work to the last one. Stretches
    skipped in between belong to it if they have none (they start a copy); otherwise
    they are the body of another tile.
    """
    result = []
    working = [region for region in schedule.regions if region.used["MXU"]]
    for span in sorted({region.inside for region in working}, key=lambda s: s.begin):
        own = [region for region in working if region.inside == span]
        other = [
            region.inside
            for region in working
            if span.holds(region.inside) and region.inside != span
        ]
        path = [
            region
            for region in schedule.regions
            if own[0].begin <= region.begin <= own[-1].begin
            and not any(inner.holds(region) for inner in other)
        ]
        used = {
            unit: sum(region.used[unit] for region in path) for unit in schedule.slots
        }
        bundles = sum(region.bundles for region in path)
        place = Span(path[0].begin, path[-1].end)
        result.append(Body(place, bundles, used, used["MXU"] / schedule.slots["MXU"]))
    return result


def tile_body(schedule: Schedule) -> Body:
    """Returns the body of a full tile: of those with the most MXU work, the plainest.

    Two bodies with the same matmuls differ a little in their MXU slots, so three
    quarters of the most are as good as the most. Bodies that mask scores or take their
    maxima have more VALU work beside the same MXU work.

    Raises:
      ValueError: the kernel has no MXU work.
    """
    candidates = bodies(schedule)
    if not candidates:
        raise ValueError("the kernel has no work for the MXU, so no body of a tile")
    most = max(body.mxu_bound for body in candidates)
    return min(
        (body for body in candidates if body.mxu_bound >= 0.75 * most),
        key=lambda body: body.used["VALU"] / body.used["MXU"],
    )


BRANCH = 5
"""Bundles of the branch that closes a loop, with its delay slots."""


@dataclass(frozen=True)
class Parts:
    """Bundles of the parts of one of our TPU kernels, before any stalls.

    A program takes `begin`, `init` unless it has a diagonal tile, `masks` if it has
    other partial tiles, its tiles, and `end`. A tile takes `tile`, and `full`, or
    `diagonal`, or `partial` and for each sub-block of it `turn` and what `live` says of
    its number of live granules.

    begin, end: with what only some programs do, and a turn of each loop in them.
    init: of the sums (forward). masks: loading the bounds of the rows (forward).
    tile: starting the next copy, waiting for this one.
    first: a sub-block's first look at its first full tile; 0 where there is a carry.
    diagonal: a tile of one head.
    live: for 1, 2 ... granules.
    """

    begin: int
    init: int
    masks: int
    end: int
    tile: int
    first: int
    full: int
    diagonal: int
    partial: int
    turn: int
    live: tuple[int, ...]


@dataclass(frozen=True)
class Nest:
    """A loop or skipped stretch, and those in it.

    own: bundles that are in none of the inner ones. used: slots, with theirs.
    """

    span: Span
    own: int
    used: dict[str, int]
    inner: tuple["Nest", ...]

    @classmethod
    def of(cls, schedule: Schedule) -> "Nest":
        """Returns the nest of a whole kernel."""
        regions = schedule.regions
        spans = {region.inside for region in regions}

        def build(span: Span) -> Nest:
            held = [other for other in spans if span.holds(other) and other != span]
            inner = [
                one
                for one in held
                if not any(other.holds(one) for other in held if other != one)
            ]
            mine = [region for region in regions if span.holds(region)]
            return cls(
                span,
                sum(region.bundles for region in mine if region.inside == span),
                {unit: sum(r.used[unit] for r in mine) for unit in schedule.slots},
                tuple(build(one) for one in sorted(inner, key=lambda one: one.begin)),
            )

        return build(Span(0, regions[-1].end))

    @property
    def working(self) -> tuple["Nest", ...]:
        """Those in it with MXU work."""
        return tuple(nest for nest in self.inner if nest.used["MXU"])

    def descend(self) -> Iterator["Nest"]:
        """Yields this nest, and those in it down to where the MXU work is cut."""
        yield self
        if len(self.working) == 1:
            (inner,) = self.working
            if inner.used["MXU"] == self.used["MXU"]:
                yield from inner.descend()


@dataclass(frozen=True)
class Kernel:
    """Loops and branches of one of our kernels.

    way: from the whole kernel down to the loop over tiles.
    begins: what only some programs begin with: `Parts.init` and `Parts.masks`.
    full, diagonals, partial: kinds of tiles; a partial one has a loop over sub-blocks.
    """

    way: tuple[Nest, ...]
    begins: tuple[Nest | None, Nest | None]
    full: Nest
    diagonals: tuple[Nest, ...]
    partial: Nest

    @classmethod
    def of(cls, schedule: Schedule) -> "Kernel":
        """Finds them.

        Raises:
          ValueError: the kernel is not built like ours.
        """
        way, body = list(Nest.of(schedule).descend()), tile_body(schedule)
        tiles = way[-1]
        full = [nest for nest in tiles.working if nest.span.holds(body.place)]
        *diagonals, partial = [nest for nest in tiles.working if nest not in full] or [
            None
        ]
        if len(way) < 3 or len(full) != 1 or partial is None:
            raise ValueError(
                "a kernel of ours has a branch for full and one for masked tiles"
            )
        # A first copy from VMEM, where short operands lie, has branches in it.
        begins = [
            nest
            for outer in way[:-1]
            for nest in outer.inner
            if nest.span.end <= tiles.span.begin
            and nest.used["VSTORE"]
            and not nest.inner
        ]
        known = tuple(begins) if len(begins) == 2 and diagonals else (None, None)
        return cls(tuple(way), known, full[0], tuple(diagonals), partial)


def read_parts(schedule: Schedule) -> Parts:
    """Reads the parts of a kernel from the nesting of its loops and branches.

    Computing a full tile again, which ordinary scores do not need, is left out.

    Raises:
      ValueError: the kernel is not built like ours.
    """
    body = tile_body(schedule)
    kernel = Kernel.of(schedule)
    sub_blocks = list(kernel.partial.descend())[-1]
    looks = [nest for nest in kernel.full.working if nest.span.end <= body.place.begin]
    tiles = kernel.way[-1]
    around = [
        region
        for region in schedule.regions
        if kernel.way[1].span.holds(region) and not tiles.span.holds(region)
    ]
    begin = sum(region.bundles for region in around if region.begin < tiles.span.begin)
    init, masks = (nest.span.bundles if nest else 0 for nest in kernel.begins)
    return Parts(
        begin=begin - init - masks,
        init=init,
        masks=masks,
        end=sum(region.bundles for region in around) - begin,
        tile=tiles.own
        + BRANCH
        + sum(nest.span.bundles for nest in tiles.inner if not nest.used["MXU"]),
        first=sum(list(nest.descend())[-1].own + BRANCH for nest in looks),
        full=kernel.full.own,
        diagonal=sum(nest.own for nest in kernel.diagonals[:1]),
        partial=kernel.partial.own,
        turn=sub_blocks.own + BRANCH,
        live=tuple(nest.own for nest in sub_blocks.working),
    )
