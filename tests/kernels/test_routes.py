"""Tests the ways that pieces take around a ring: what they send, and what it gives."""

import functools
import math

import jax.numpy as jnp
import pytest

from kernels import layouts, masks, reads, reference
from kernels.cases import (
    COVERING,
    FLOAT32_TOLERANCE,
    LAYOUTS,
    Case,
    Problem,
    solve,
)
from kernels.schedule import Route, Walk
from tests.rings import Make, sharded_ring, solve_on_ring

COUNTED = Route(is_counted=True)
COUNTED_BOTH_WAYS = Route(is_counted=True, counts_both_ways=True)


def cycles(ring_size: int) -> list[Walk]:
    """Returns walks of different strides, which have all devices where prime to N."""
    strides = [n for n in range(1, ring_size // 2 + 1) if math.gcd(n, ring_size) == 1]
    return [
        Walk((tuple(i * stride % ring_size for i in range(ring_size)),))
        for stride in strides or [1]
    ]


def both_ways(walks: list[Walk]) -> tuple[Walk, ...]:
    return tuple(way for walk in walks for way in (walk, walk.back()))


def routes(case: Case) -> dict[str, Route]:
    """Returns each route of a case's ring."""
    order = LAYOUTS[case.layout], case.ring_size
    padded = layouts.padded_length(*order, case.length)
    in_order = [layouts.permute(bound, *order) for bound in case.visible(padded)]
    visible = masks.Visible(*in_order)
    found = reads.reads_of(visible, *order)
    return {
        "both": Route(both_ways(cycles(case.ring_size)[:1])),
        "cycles": Route(both_ways(cycles(case.ring_size))),
        "reads": Route(reads=found),
        "counted": COUNTED,
        "counted_both": COUNTED_BOTH_WAYS,
        "levels": Route(both_ways(cycles(case.ring_size)[:1]), outer=slow(case)),
    }


def slow(case: Case) -> int:
    """Returns the rings of a ring of two levels: the most, but of one device each."""
    return max(n for n in (1, 2, 4) if case.ring_size % n == 0 and n < case.ring_size)


@functools.cache  # so that equal rings are compiled once
def ring_of(route: Route, takes_turns: bool | None) -> Make:
    return functools.partial(sharded_ring, takes_turns=takes_turns, route=route)


def each_case(*quick: tuple[Case, str]):
    """Every case on every route that its ring has, each in one of the three ways back.

    quick: those of them that are no slow tests.
    """
    found = [pytest.param(*it, id="-".join((it[0].name, it[1]))) for it in quick]
    names = list(routes(COVERING[0]))
    rings = [case for case in COVERING if case.ring_size > 1]
    for case in rings:
        for name in names:
            if (case, name) not in quick:
                ids = f"{case.name}-{name}"
                found.append(pytest.param(case, name, id=ids, marks=pytest.mark.slow))
    return pytest.mark.parametrize("case, name", found)


@pytest.mark.usefixtures("steps_in_a_loop")
@each_case(
    (Case(5, "striped", "causal", 4, 31, 64, heads=8), "both"),
    (Case(7, "zigzag", "documents", 1, 57, 16, "sinks-cap", heads=8), "cycles"),
    (Case(4, "contiguous", "window", 2, 61, 16, heads=4), "reads"),
    (Case(3, "zigzag", "window", 2, 93, 16, "sinks", heads=4), "reads"),
    (Case(8, "contiguous", "documents", 2, 257, 16, heads=4), "counted"),
    (Case(5, "zigzag", "documents", 2, 93, 16, heads=2), "counted_both"),
    (Case(2, "striped4", "none", 4, 31, 64, heads=4), "both"),
    (Case(8, "striped", "documents", 2, 61, 16, heads=4), "levels"),
    (Case(4, "zigzag", "causal", 2, 61, 16, "sinks-cap", heads=2), "levels"),
)
def test_every_route_in_float32_matches_one_device_in_float64(case, name, rng):
    problem = Problem.of(rng, case)
    truth = solve(problem, jnp.float64)
    route = routes(case)[name]
    ways = (False, True, None) if case.length < 100 else (True,)
    for takes_turns in ways:
        make = ring_of(route, takes_turns)
        answer = solve_on_ring(case, problem, reference, jnp.float32, make)
        errors = answer.errors(truth)
        assert max(errors.values()) <= FLOAT32_TOLERANCE, (takes_turns, errors)
