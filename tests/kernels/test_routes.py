"""Tests the routes of a ring: what they send, and what it gives."""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import layouts, masks
from kernels.attention import attention
from kernels.backends import reference
from kernels.backends.steps import PlainForward
from kernels.ring import routes
from kernels.ring.routes import (
    AllShards,
    Counted,
    Neighbours,
    Route,
)
from kernels.ring_attention import make_ring_attention
from tests.cases import table
from tests.cases.attention import COVERING, LAYOUTS, Case
from tests.support.rings import assert_as_on_one_device, ring_mesh, ring_with

COUNTED = Counted()
COUNTED_BOTH_WAYS = Counted(both_ways=True)


def routes_of(case: Case) -> dict[str, Route]:
    """Returns each route of a case's ring."""
    order = LAYOUTS[case.layout], case.ring_size
    padded = layouts.padded_length(*order, case.length)
    in_order = [layouts.permute(bound, *order) for bound in case.visible(padded)]
    visible = masks.Visible(*in_order)
    found = routes.reads_of(visible, *order)
    return {
        "both": AllShards(both_ways=True),
        "reads": Neighbours((found,)),
        "counted": COUNTED,
        "counted_both": COUNTED_BOTH_WAYS,
    }


QUICK = table("kernels.txt", "route", Case=Case)
NARROW = Case(2, "zigzag", "causal", 4, 256, 64)


def each_case():
    """Every case on every route that its ring has, most of them in slow tests."""
    for case, name in QUICK:
        yield pytest.param(case, name, jnp.float32, id=f"{case.name}-{name}")
    yield NARROW, "counted_both", jnp.bfloat16
    slow = [(NARROW, "both", jnp.bfloat16)]
    for name in "both", "counted_both":
        slow.append((replace(NARROW, ring_size=8), name, jnp.bfloat16))
    rings = [case for case in COVERING if case.ring_size > 1]
    slow += itertools.product(rings, routes_of(COVERING[0]), [jnp.float32])
    for case, name, dtype in slow:
        ids = f"{case.name}-{name}-{dtype.__name__}"
        yield pytest.param(case, name, dtype, id=ids, marks=pytest.mark.slow)


@pytest.mark.thorough(quick=1)
@pytest.mark.usefixtures("steps_in_a_loop")
@pytest.mark.parametrize("case, name, dtype", list(each_case()))
def test_every_route_matches_one_device(case, name, dtype, rng):
    make = ring_with(route=routes_of(case)[name])
    assert_as_on_one_device(rng, case, reference, dtype, make)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("cores", [1, 2])
def test_every_piece_of_every_shard_visits_every_device_once(heads, cores):
    for ways in (1, 2):
        schedule = AllShards(ways > 1, cores).schedule(7, heads, 48)
        if heads % cores == 0:  # none of them leaves a core without a head
            assert all((end - begin) % cores == 0 for begin, end in schedule.heads)
        seen = np.zeros((7, 7, heads, 48), int)  # device, shard, head, slot
        sent = {}  # numbers of a shard over a link, each way
        for chunk in schedule.chunks:
            part = slice(*chunk.heads), slice(*chunk.slots)
            for step in range(chunk.first, chunk.last + 1):
                for device in range(7):
                    seen[device, (device - chunk.shifts(step)) % 7][part] += 1
            sent[chunk.way] = chunk.last * seen[0, 0][part].size
        assert (seen == 1).all()
        assert len(sent) == ways == len(schedule.chunks)
        together = math.gcd(heads, cores)
        units = heads // together
        if units >= ways:
            assert max(sent.values()) == 6 * 48 * together * -(-units // ways)
        else:
            assert max(sent.values()) == 6 * heads * 16 * 2  # slots in tiles of 16
    assert len(AllShards(True).schedule(7, 1, 16).chunks) == 1  # which are not cut


def layout_bounds(layout_name: str, ring_size: int, length: int, mask: masks.Mask):
    index = layouts.order(LAYOUTS[layout_name], ring_size, length)
    return mask(index, length)


@pytest.mark.parametrize("length", [1, 57, 128, 254, 256])
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped4"])
def test_reads_of_tiles_hold_those_of_rows(layout_name, length, monkeypatch):
    """Long sequences are looked at by tiles, which may say more but never less."""
    layout, ring_size = LAYOUTS[layout_name], 6
    length = layouts.padded_length(layout, ring_size, length * ring_size)
    for window in (1, 3, 300):
        visible = layout_bounds(layout_name, ring_size, length, masks.window(window))
        every = dict(routes.reads_of(visible, layout, ring_size))
        monkeypatch.setattr(routes, "EVERY_ROW", 0)
        tiles = dict(routes.reads_of(visible, layout, ring_size))
        monkeypatch.undo()
        for offset, (begin, end) in every.items():
            assert tiles[offset][0] <= begin < end <= tiles[offset][1]
        if layout_name != "striped4" and length >= 128 * ring_size:
            assert tiles == every  # whole tiles


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, lengths", [("contiguous", (8, 24)), ("zigzag", (24, 8))]
)
def test_where_keys_are_not_as_many_as_queries_no_shard_is_left_out(name, lengths, rng):
    """What is known of a mask says which shards are read only where they are alike."""
    layout, mesh = LAYOUTS[name], ring_mesh(4)
    q, k, v = (
        rng.standard_normal((1, length, 2, 8)).astype(np.float32)
        for length in (lengths[0], lengths[1], lengths[1])
    )
    ids = np.sort(rng.integers(0, 4, (1, 24))).astype(np.int32)
    seen = masks.window(3), masks.documents(ids), masks.causal() & masks.padding(7)
    attend = make_ring_attention(
        mesh, layout=layout, implementation="reference", count_steps=True
    )
    shards = [layouts.permute(x, layout, 4) for x in (q, k, v)]
    on_ring = jax.jit(lambda *x: [attend(*x, mask) for mask in seen])(*shards)
    for mask, out in zip(seen, on_ring, strict=True):
        want = attention(q, k, v, visible=mask, implementation="reference")
        out = layouts.unpermute(out, layout, 4)
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped4"])
def test_a_counted_ring_of_documents_in_their_shards_sends_nothing(layout_name, rng):
    """Each device attends to its own keys alone, forward and backward."""
    order = LAYOUTS[layout_name], 2
    x = np.float32(rng.standard_normal((3, 1, 16, 2, 8)))
    ids = np.arange(16)[None] // 4  # the chunks of zigzag, and stripes
    more = {"layout": order[0], "implementation": "reference", "count_steps": True}
    attend = make_ring_attention(ring_mesh(2), **more)

    def on_ring(ids, *qkv):
        qkv = (layouts.permute(x, *order) for x in qkv)
        return layouts.unpermute(attend(*qkv, masks.documents(ids)), *order)

    def on_one(ids, *qkv):
        return attention(*qkv, visible=masks.documents(ids))

    @functools.partial(jax.jit, static_argnums=0)
    def results(run, ids, *qkv):
        out, pull = jax.vjp(functools.partial(run, ids), *qkv)
        return out, *pull(out)

    for found, want in zip(
        *(results(r, ids, *x) for r in (on_ring, on_one)), strict=True
    ):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class OwnForm(PlainForward):
    """Steps whose carry only kernels for as many keys can read."""

    keys: int = 0

    def begin(self, partial):
        return {f"{self.keys} keys": partial}

    def finish(self, carry):
        return carry[f"{self.keys} keys"]

    def attend(self, k, v, seen, carry):
        assert k.shape[1] == self.keys
        carry = carry and self.finish(carry)
        return self.begin(super().attend(k, v, seen, carry))


class OwnForms:
    """A backend of these steps."""

    forward, backward = (
        staticmethod(reference.forward),
        staticmethod(reference.backward),
    )

    def forward_steps(self, q, k, visible, scores):
        return OwnForm(reference, q, scores, k.shape[1])


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("window", [3, 64])
def test_carries_are_read_by_kernels_for_other_lengths_in_a_common_form(window, rng):
    """Neighbours send less than a shard of a window; without one all send the same."""
    layout, mesh = layouts.Contiguous(), ring_mesh(2)
    q, k, v = np.float32(rng.standard_normal((3, 1, 64, 2, 8)))
    mask = masks.causal() & masks.window(window)
    attend = make_ring_attention(mesh, layout=layout, implementation=OwnForms())
    out = jax.jit(lambda *x: attend(*x, mask))(q, k, v)
    want = attention(q, k, v, visible=mask, implementation="reference")
    np.testing.assert_allclose(out, want, atol=1e-5)
