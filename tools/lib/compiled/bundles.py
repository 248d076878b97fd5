"""Reads the static schedule that the TPU's compiler made of a kernel, by region.

The schedule is a list of bundles, instructions that start together, one bundle a cycle
unless something stalls. The compiler writes it as text, and for every bundle how many
slots of each unit it fills. VLOAD includes FILL and VSTORE includes SPILL: registers
that did not fit and went to VMEM and back.

Branches and their targets cut the schedule into regions.
"""

import itertools
import re
from collections import defaultdict
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
        used = dict(
            zip(slots, map(sum, zip(*rows[begin:end], strict=True)), strict=True)
        )
        holders = [outer for outer in spans if outer.holds(span)]
        inside = min(holders, key=lambda outer: outer.bundles)
        regions.append(Region(begin, end, inside, used))
    return Schedule(tuple(regions), slots)


def _read_utilization(text: str) -> tuple[list[list[int]], dict[str, int]]:
    """Returns the slots that each bundle uses, and the slots of a bundle by unit."""
    head, _, table = text.partition("== UTILIZATION:\n")
    lines = head.splitlines()
    if len(lines) != 3:
        raise ValueError(f"no table of utilization: it begins {text[:80]!r}")
    capacity = map(int, lines[2].split())
    slots = dict(zip(lines[1].split(", "), capacity, strict=True))
    rows = [list(map(int, row.split())) for row in table.splitlines() if row]
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
    that is not marked: only their own bundle is an edge.
    """
    edges = {0, len(bundles)}
    spans = {Span(0, len(bundles))}
    targets: dict[str, int] = {}
    for number, (_, text) in enumerate(bundles):
        targets |= dict.fromkeys(_TARGET.findall(text), number)
    for number, (label, text) in enumerate(bundles):
        if label:
            edges.add(number)
        for region in _BRANCH.findall(text):
            target = targets.get(region, number)
            edges |= {number, target}
            spans.add(Span(min(number, target), max(number, target)))
    return edges, spans


def bodies(schedule: Schedule) -> list[Body]:
    """Returns the bodies of tiles: of each loop or skipped stretch with MXU work.

    A body reaches from the first region with MXU work to the last one. Stretches
    skipped in between belong to it if they have none (they start a copy); otherwise
    they are the body of another tile.
    """
    bodies = []
    working: dict[Span, list[Region]] = defaultdict(list)
    for region in schedule.regions:
        if region.used["MXU"]:
            working[region.inside].append(region)
    for span in sorted(working, key=lambda span: span.begin):
        first = working[span][0].begin
        last = working[span][-1].begin
        inner = [other for other in working if span.holds(other) and other != span]
        bundles = 0
        used = dict.fromkeys(schedule.slots, 0)
        for region in schedule.regions:
            is_between = first <= region.begin <= last
            # Stretches with MXU work of their own are other tiles' bodies.
            if is_between and not any(other.holds(region) for other in inner):
                bundles += region.bundles
                for unit in used:
                    used[unit] += region.used[unit]
        bodies.append(Body(bundles, used, used["MXU"] / schedule.slots["MXU"]))
    return bodies


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
    full = [body for body in candidates if body.mxu_bound >= 0.75 * most]
    return min(full, key=lambda body: body.used["VALU"] / body.used["MXU"])
