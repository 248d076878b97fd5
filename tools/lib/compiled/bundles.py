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
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|0) +([A-Z]{2})? *:[ >]*\{", re.MULTILINE)
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

    inside: the smallest loop or skipped stretch that holds it.
    used: slots by unit, of all its bundles.
    """

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

    bundles: from the first to the last one with MXU work, and so the cycles of a tile
      before any stalls.
    used: slots by unit.
    mxu_bound: bundles that the MXU slots would fill by themselves.
    """

    bundles: int
    used: dict[str, int]
    mxu_bound: float


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


def _read_bundles(text: str) -> Iterator[tuple[str | None, str]]:
    """Yields label and text of every bundle; comments may span lines."""
    starts = list(_BUNDLE.finditer(text))
    ends = [match.start() for match in starts[1:]] + [len(text)]
    for match, end in zip(starts, ends, strict=True):
        yield match[1], text[match.end() : end]


def _read_branches(
    bundles: Sequence[tuple[str | None, str]],
) -> tuple[set[int], set[Span]]:
    """Returns the edges of regions, and the spans of loops and skipped stretches.

    A loop ends before the branch that closes it: that and its delay slots, up to five
    bundles, are a region of their own. A few branches, outside of loops, have a target
    that is not marked: only their own place is an edge.
    """
    edges, spans = {0, len(bundles)}, {Span(0, len(bundles))}
    targets = {
        region: place
        for place, (_, text) in enumerate(bundles)
        for region in _TARGET.findall(text)
    }
    for place, (label, text) in enumerate(bundles):
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
        result.append(Body(bundles, used, used["MXU"] / schedule.slots["MXU"]))
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
