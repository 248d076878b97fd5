"""Conditional rescale: right whatever the scores do, exact where it has to be."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends import reference
from kernels.backends.tpu import query_tile
from kernels.backends.tpu.softmax import SUM_LIMIT
from kernels.merge import Partial
from tests.cases import in_tiers
from tests.support.simulated_tpu import SIMULATED_TPU
from tests.support.steps import Step, StepCase, compiled, run_forward

SCALE = 0.25
TILE, SUB_BLOCKS = 256, 2
KEY_TILES, QUERY_TILES = 4, 2
FIRST = StepCase(QUERY_TILES * TILE, KEY_TILES * TILE, group=1, batch=1)
LATER = dataclasses.replace(FIRST, has_carry=True)
CASES = {"first ring step": FIRST, "later ring step": LATER}
# Of the key tiles, in the kernel's order: from the last one.
LEVELS = {
    "level": (0, 0, 0, 0),
    "rising": (0, 100, 200, 300),
    "falling": (300, 200, 100, 0),
    "jumping": (0, 400, -400, 100),
    "below a carry": (-300, -300, -300, -200),
}


CAUSAL = StepCase(KEY_TILES * TILE, KEY_TILES * TILE, group=1, batch=1)
VISITING = dataclasses.replace(CAUSAL, has_carry=True)
INDEX = np.arange(CAUSAL.queries, dtype=np.int32)
GRANULE = 128
STRIPE = INDEX // GRANULE * GRANULE
CAUSAL_CASES = {
    "own keys": (CAUSAL, INDEX + 1),
    "visiting keys": (VISITING, INDEX),
    "two heads": (dataclasses.replace(VISITING, group=2), INDEX),
    "four heads": (dataclasses.replace(VISITING, group=4), INDEX + 1),
    "wide stripes": (VISITING, STRIPE + GRANULE),
    "wide stripes of a later shard": (VISITING, STRIPE),
    "wide stripes, two heads": (dataclasses.replace(VISITING, group=2), STRIPE),
    "wide stripes, four heads": (
        dataclasses.replace(VISITING, group=4),
        STRIPE + GRANULE,
    ),
    # As shards see their own keys in attention to whole blocks.
    "wide stripes, no carry": (CAUSAL, STRIPE + GRANULE),
}
"""And where each query's keys end."""


def step_at_levels(
    rng: np.random.Generator,
    case: StepCase,
    levels: tuple[float, ...],
    attends_to_all: bool = True,
) -> Step:
    """Draws scores that differ by `levels` from tile to tile, and by noise in them."""
    step = case.draw(rng)
    step.q[..., 0] = 1
    step.k[..., 0] = (np.repeat(levels[::-1], TILE) / SCALE)[:, None]
    step.k[...] = step.k.astype(np.float32)
    if not attends_to_all:
        return step
    start = np.zeros_like(step.k_start)
    return step._replace(k_start=start, k_end=start + case.keys)


program = functools.partial(compiled, scale=SCALE, run=run_forward)
"""Returns step -> (out, lse), traced again, so that patches of the module hold."""

REFERENCE = program(reference)


@pytest.fixture(scope="module")
def run_and_count():
    """Returns step -> (its results, the number of tiles computed exactly).

    One program for all tests, as its shapes take long to compile.
    """
    count, exact_tile = itertools.count(), query_tile.exact_tile

    def counted(*operands):
        jax.debug.callback(lambda: next(count))
        exact_tile(*operands)

    run = program(SIMULATED_TPU)

    def run_and_count(step: Step) -> tuple[Partial, int]:
        before = next(count)
        results = jax.block_until_ready(run(step.astype(jnp.float32)))
        jax.effects_barrier()
        return results, (next(count) - before - 1) // SUB_BLOCKS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(query_tile, "exact_tile", counted)
        yield run_and_count


def errors(results: Partial, truth: Partial) -> np.ndarray:
    """Returns the relative errors of out and of lse, in the 2-norm."""
    found = []
    for x, exact in zip(results, truth, strict=True):
        x, exact = np.asarray(x, np.float64), np.asarray(exact, np.float64)
        is_live = np.isfinite(exact)
        np.testing.assert_array_equal(x[~is_live], exact[~is_live])
        x, exact = x[is_live], exact[is_live]
        found.append(np.linalg.norm(x - exact) / np.linalg.norm(exact))
    return np.array(found)


def assert_exact(results: Partial, step: Step, oracle=REFERENCE) -> None:
    """Allows what rounding scores of hundreds to float32 makes of the reference."""
    with jax.enable_x64(True):
        truth = oracle(step.astype(jnp.float64))
    found = errors(results, truth)
    allowed = errors(oracle(step.astype(jnp.float32)), truth)
    assert (found <= 2 * allowed + 1e-6).all(), (found, allowed)


def courses():
    """Step, levels, and whether all keys are seen, which are slow tests by turns."""
    for number, (name, levels) in enumerate(itertools.product(CASES, LEVELS)):
        for attends_to_all in True, False:
            is_slow = number % 2 == attends_to_all
            marks = [pytest.mark.slow] * is_slow
            yield pytest.param(name, levels, attends_to_all, marks=marks)


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize("name, levels, attends_to_all", list(courses()))
def test_any_course_of_scores_gives_the_exact_softmax(
    name, levels, attends_to_all, run_and_count, rng
):
    step = step_at_levels(rng, CASES[name], LEVELS[levels], attends_to_all)
    assert_exact(run_and_count(step)[0], step)


@pytest.mark.thorough
def test_capped_scores_that_rise_give_the_exact_softmax(rng):
    """From 0 to 180, and log2(e) times as much as exponents: tiles run again."""
    step = step_at_levels(rng, CASES["first ring step"], LEVELS["rising"])
    capped = functools.partial(program, soft_cap=200.0)
    results = capped(SIMULATED_TPU)(step.astype(jnp.float32))
    assert_exact(results, step, capped(reference))


@pytest.mark.thorough
def test_rising_scores_overflow_where_no_limit_is_set(run_and_count, monkeypatch, rng):
    """Shows that the test above of rising scores needs tiles to be computed again."""
    ordinary, rising = (
        step_at_levels(rng, CASES["first ring step"], LEVELS[name]).astype(jnp.float32)
        for name in ("level", "rising")
    )
    expected, _ = run_and_count(ordinary)
    monkeypatch.setattr(query_tile, "SUM_LIMIT", math.inf)
    run = program(SIMULATED_TPU)
    assert not any(np.isfinite(x).any() for x in run(rising))
    assert (errors(run(ordinary), expected) < 1e-6).all()


def causal_step(
    rng: np.random.Generator, name: str, levels: tuple[float, ...] = LEVELS["level"]
) -> Step:
    """Draws a step whose queries see all keys up to an end."""
    case, end = CAUSAL_CASES[name]
    step = step_at_levels(rng, case, levels, attends_to_all=False)
    return step._replace(k_start=np.zeros_like(end[None]), k_end=end[None].copy())


@pytest.mark.thorough
@pytest.mark.parametrize("name, levels", in_tiers("kernels.txt", "diagonal"))
def test_diagonals_give_the_exact_softmax_whatever_the_scores_do(
    name, levels, run_and_count, rng
):
    """Keys that no piece of a tile has to compute are nan."""
    step = causal_step(rng, name, LEVELS[levels])
    end = -(-step.k_end.max() // GRANULE) * GRANULE
    k, v = step.k.copy(), step.v.copy()
    k[:, end:] = v[:, end:] = np.nan
    assert_exact(run_and_count(step._replace(k=k, v=v))[0], step)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CAUSAL_CASES)
def test_causal_steps_need_no_exact_tiles(name, run_and_count, rng):
    step = causal_step(rng, name)
    if step.carry:  # of rows that have seen their own key
        step.carry[1][...] = np.abs(step.k).max()
    assert run_and_count(step)[1] == 0
    # Where a query sees one key less, its tile is no diagonal one.
    step.k_end[0, TILE] -= 1
    assert run_and_count(step)[1] > 0


@pytest.mark.thorough
def test_a_diagonal_is_computed_exactly_where_its_scores_rise(run_and_count, rng):
    """Above those of its masked keys, whose maximum is m, or above a carry's."""
    for name in "own keys", "visiting keys":
        step = causal_step(rng, name)
        step.q[..., 0] = 1
        step.k[:, 0, :, 0] = 400  # of the first key alone
        results, tiles = run_and_count(step)
        assert_exact(results, step)
        # One in each query tile, of the key tile that holds the first key.
        assert tiles > 0


@pytest.mark.thorough
def test_tiles_are_computed_exactly_as_soon_as_a_sum_passes_the_limit(
    run_and_count, rng
):
    """Each lane adds up two keys a tile: two of 2^29 reach it."""
    assert SUM_LIMIT == 2.0**30
    for levels, tiles in (
        ((0, 0, 0, 0), 0),
        ((300, 0, -300, 300), 0),
        ((0, 28.9, 0, 0), 0),
        ((0, 29.1, 0, 0), 1),
        ((0, 28.6, 28.6, 28.6), 1),
        ((0, 30, 30, 60), 2),
        ((0, 40, 80, 120), 3),
    ):
        step = step_of_powers(rng, levels)
        assert run_and_count(step)[1] == tiles * QUERY_TILES, levels
    # One row is enough, and the other query tile goes on without rescaling.
    step.q[:, 1:] = 0
    assert run_and_count(step)[1] == 3


def step_of_powers(rng: np.random.Generator, levels: tuple[float, ...]) -> Step:
    """Draws scores of which all keys of a tile have P = 2 ** its level."""
    step = step_at_levels(rng, CASES["first ring step"], levels)
    step.q[...] = step.k[...] = 0
    step.q[..., 0] = math.log(2) / SCALE
    step.k[..., 0] = np.repeat(levels[::-1], TILE)[:, None]
    return step
