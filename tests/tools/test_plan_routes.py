"""What the planner says that rings send and compute, against rings that are traced."""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.document_mask import DocumentMask
from kernels import layouts, ring_steps
from kernels.masks import Visible
from kernels.ring_device import Ring as DeviceRing
from kernels.schedule import Route, Walk, default_walks
from tests.pages import PAGES
from tests.rings import ring_mesh
from tools.lib.planning.kernels import Kernels
from tools.lib.planning.ring import Ring
from tools.lib.planning.ring_steps import Sequence, document_spans
from tools.lib.planning.routes import Load, Pass, counted_steps, route_of
from tools.lib.planning.thresholds import KI, ROUTES, threshold
from training import chips

LENGTH, DEPTH = 512, 8
CAUSAL = DocumentMask()
V5P, V6E, H200 = map(chips.find, ("TPU v5", "TPU v6 lite", "NVIDIA H200"))


def cycles(size: int, strides: tuple[int, ...]) -> tuple[Walk, ...]:
    """Walks of these strides, prime to the size, each both ways."""
    walks = [Walk(tuple(i * n % size for i in range(size))) for n in strides]
    return tuple(way for walk in walks for way in (walk, walk.back()))


class Recorder:
    """A backend, and a ring's transfers, as lists of what stands between barriers."""

    def __init__(self):
        self.parts = [(Counter(), Counter())]

    def forward(self, q, k, v, *bounds, carry, **options):
        self.parts[-1][0][k.shape[1:3]] += 1
        return q.astype(jnp.float32), jnp.zeros((1, q.shape[2], q.shape[1]))

    def backward(self, q, k, v, *operands, dq, dkv, **options):
        self.parts[-1][0][k.shape[1:3]] += 1
        return dq, k.astype(jnp.float32), v.astype(jnp.float32)

    def hop(self, ring, pair, walk, hops=1):
        is_gradient = pair[0].dtype == jnp.float32
        name = pair[0].shape[1:3], walk, hops % walk.length, is_gradient
        self.parts[-1][1][name] += 1
        return pair

    def barrier(self, ring, arrays, dq=None):
        self.parts.append((Counter(), Counter()))
        return arrays, dq


def traced(route, size, heads, direction, turns, monkeypatch):
    """Returns (kernels, transfers) between the barriers of a ring that is traced."""
    found = Recorder()
    monkeypatch.setattr(DeviceRing, "hop", lambda *of: found.hop(*of))
    monkeypatch.setattr(ring_steps, "is_cpu", lambda: False)
    monkeypatch.setattr(ring_steps, "_where_seen", lambda _, run, sums: run(sums))
    monkeypatch.setattr(DeviceRing, "barrier", lambda *of: found.barrier(*of))
    layout = layouts.Striped()
    ring = DeviceRing(
        "ring", size, layout, 1.0, found, route=route, takes_turns=turns == 2
    )

    def run(q, kv, rows, visible):
        if direction == "forward":
            return ring_steps.forward_steps(ring, q, (kv, kv), visible, LENGTH)
        return ring_steps.backward_steps(ring, (q, q, rows, rows), (kv, kv), visible)

    q, kv = (
        jax.ShapeDtypeStruct((1, LENGTH, n, DEPTH), "bfloat16") for n in (8, heads)
    )
    rows = jax.ShapeDtypeStruct((1, 8, LENGTH), "float32")
    bound = jax.ShapeDtypeStruct((1, LENGTH), "int32")
    everywhere = functools.partial(jax.shard_map, mesh=ring_mesh(size), check_vma=False)
    spec = jax.sharding.PartitionSpec()
    program = everywhere(run, in_specs=spec, out_specs=spec)
    jax.eval_shape(program, q, kv, rows, Visible(bound, bound))
    return found.parts


def planned(route, size, heads, direction, turns):
    """Returns the same of the planner's pass."""
    done = Pass.of(route, size, (heads, LENGTH), direction, turns)
    pieces = done.schedule.pieces

    def shape(number):
        heads, slots = pieces[number].heads, pieces[number].slots
        return slots[1] - slots[0], heads[1] - heads[0]

    for step in range(done.steps):
        for part in done.parts(step):
            kernels = Counter(shape(one.piece) for one in part.attended)
            sent = Counter()
            for one in part.sent:
                walk = pieces[one.piece].walk
                hops = one.hops % walk.length
                sent[shape(one.piece), walk, hops, one.is_gradient] += 1
            yield kernels, sent


def joined(parts):
    """Joins parts in which nothing travels to the next: no barrier is behind them."""
    found, waiting = [], Counter()
    for kernels, sent in parts:
        waiting += kernels
        if sent:
            found.append((waiting, sent))
            waiting = Counter()
    return [*found, (waiting, Counter())]


WINDOW = route_of(layouts.Contiguous(), 5, LENGTH, DocumentMask(window=130), ())
ZIGZAG = route_of(layouts.Zigzag(), 4, LENGTH, DocumentMask(window=130), ())
CASES = {
    "one way": (Route(), 4),
    "both ways": (Route(default_walks(4)), 4),
    "cycles": (Route(cycles(5, (1, 2))), 5),
    "neighbour": (WINDOW, 5),
    "neighbours": (ZIGZAG, 4),
    "two devices": (Route(default_walks(2)), 2),
}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("name", CASES)
def test_a_pass_has_the_kernels_and_transfers_of_the_ring(
    name, heads, direction, monkeypatch
):
    route, size = CASES[name]
    for turns in (1, 2) if direction == "backward" else (1,):
        ring = size, heads, direction, turns
        expected = joined(traced(route, *ring, monkeypatch))
        found = joined(planned(route, *ring))
        assert any(sent for _, sent in found)
        assert found == expected


@pytest.mark.parametrize("documents", [(), (2000,), (96,), (96, 1400)])
@pytest.mark.parametrize("layout", [layouts.Contiguous(), layouts.Zigzag()], ids=str)
def test_counted_steps_are_those_that_the_ring_counts(layout, documents):
    size, total = 4, 4 * LENGTH
    route = route_of(layout, size, LENGTH, CAUSAL, (), is_counted=True)
    assert route.is_counted
    assert route.counts_both_ways == isinstance(layout, layouts.Zigzag)
    token = layouts.order(layout, size, total)
    visible = CAUSAL.bounds(token, *document_spans(documents, token, total))
    bounds = Visible(*(jnp.asarray(bound, jnp.int32)[None] for bound in visible))
    ring = DeviceRing("ring", size, layout, 1.0, None, route=route)
    spec = jax.sharding.PartitionSpec
    count = jax.shard_map(
        lambda visible: ring.count(visible, LENGTH),
        mesh=ring_mesh(size),
        in_specs=spec(None, "ring"),
        out_specs=spec(),
        check_vma=False,
    )
    known = Visible(*(np.asarray(bound)[None] for bound in visible))
    assert counted_steps(route, known, layout, size) == int(jax.jit(count)(bounds))


def test_a_counted_ring_sends_for_its_steps_and_brings_gradients_home_alone():
    route = Route(is_counted=True, counts_both_ways=True)
    for count in (1, 3):
        forward, backward = (
            Pass.of(route, 8, (4, LENGTH), direction, turns=2, count=count)
            for direction in ("forward", "backward")
        )
        # Whole shards go either way.
        assert carried(forward) == {walk: Load(count, 0) for walk in default_walks(8)}
        assert carried(backward) == {
            walk: Load(count, 2 * count) for walk in default_walks(8)
        }
        parts = itertools.chain.from_iterable(
            map(backward.parts, range(backward.steps))
        )
        home = [part for part in parts if not part.attended]
        assert sum(len(part.sent) for part in home) == 4
        assert {abs(one.hops) for part in home for one in part.sent} == {count}
    alone = Pass.of(route, 8, (4, LENGTH), "backward", turns=2, count=0)
    assert carried(alone) == {} and alone.steps == 1


def carried(done: Pass) -> dict[Walk, Load]:
    """Sums what each link carries in a pass."""
    total: dict[Walk, Load] = {}
    for step in range(done.steps):
        for part in done.parts(step):
            for walk, load in done.loads(part).items():
                total[walk] = total.get(walk, Load(0, 0)) + load
    return total


def fullest(walks, size, heads, direction, gradient=2.0):
    """Bytes over the fullest link beside the kernels of a middle step, by a shard's.

    gradient: bytes of a shard's gradients, by those of its keys and values.
    """
    done = Pass.of(Route(walks), size, (heads, LENGTH), direction, turns=2)
    return sum(
        max(load.keys + gradient * load.gradients for load in done.loads(part).values())
        for part in done.parts((size - 1) // 2)
    )


def test_links_carry_half_a_shard_both_ways_and_two_thirds_where_turns_are_unlike():
    around, cycle = default_walks(8), cycles(16, (1, 3, 5))
    assert fullest(around[:1], 8, 8, "forward") == 1
    assert fullest(around[:1], 8, 8, "backward") == 1 + 2
    for heads, forward, backward in (
        (8, 1 / 2, 3 / 2),
        (4, 1 / 2, 3 / 2),
        (2, 1 / 2, 2),
    ):
        assert fullest(around, 8, heads, "forward") == forward
        assert fullest(around, 8, heads, "backward") == backward
    # Of eight heads six walks would send no less over each than four.
    assert fullest(cycle, 16, 8, "forward") == 1 / 4
    assert fullest(cycle, 16, 12, "forward") == 1 / 6
    assert fullest(cycle, 16, 12, "backward") == pytest.approx(3 / 6)
    # Two devices have one link, whichever way.
    assert fullest(default_walks(2), 2, 8, "forward") == 1


def test_windows_send_what_neighbours_read_and_skip_the_other_steps():
    window = DocumentMask(window=1024)
    route = route_of(layouts.Zigzag(), 64, 16384, window, default_walks(64))
    sequence = Sequence(layouts.Zigzag(), 64, 16384, (), window)
    sent = 2 * 16384 * 8 * 128 * 2
    shape = 1, 32, 8, 128, "bfloat16"
    ring = Ring(sequence, *shape, sent, 2 * sent, route, 2)
    assert ring.describe() == "neighbours" and ring.once("forward").steps < 4
    few = ring.times(Kernels.of(V5P), "forward")
    whole = Ring(sequence, *shape, sent, 2 * sent, Route(default_walks(64)), 2)
    every = whole.times(Kernels.of(V5P), "forward")
    assert few.transfers < every.transfers / 100 and few.outlasting == 0
    assert few.kernels < every.kernels


(MESHES,) = (page for page in PAGES if str(page) == "docs/meshes.md")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in MESHES.text.splitlines()
    if line.startswith(("| v", "| H")) and " / " in line
]


@pytest.mark.thorough
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_thresholds_of_the_table_are_those_of_the_planner(row):
    name, *cells = row
    (chip,) = (c for c in chips.CHIPS if c.name in (name, f"TPU {name}"))
    for route, cell in zip(ROUTES, cells, strict=True):
        if cell == "-":
            continue
        found = [threshold(chip, route, kv_heads) for kv_heads in (32, 8)]
        assert cell == " / ".join(f"{n / KI:.1f}" if n else "any" for n in found)
