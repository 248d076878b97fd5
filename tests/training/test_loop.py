"""The loop: what is done after which step, where it stops, and for which steps."""

import dataclasses
import math
import re
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.cases import table
from tests.support.pages import ROOT
from training.hosts.watchdog import Watchdog
from training.loop import Intervals, Loop, Programs
from training.reports.goodput import Goodput
from training.reports.metrics import StepWork, Throughput
from training.reports.profiler import Profiler
from training.reports.report import Report
from training.reports.sinks import Sink
from training.saved.digest import digests, not_finite
from training.saved.stored_step import NotFinite
from training.step import TrainState
from training.update.guard import (
    SPIKE_WINDOW,
    BadSteps,
    Replay,
    compare_replays,
    initial_guard,
    judge,
)

STEPS = 10
EVERY = 2, 3, 4
"""Steps between lines, validations and saves."""


class Stop:
    """A notice that arrives at a call of `requested`; None for never."""

    def __init__(self, call: int | None):
        self.left = math.inf if call is None else call

    def requested(self) -> bool:
        self.left -= 1
        return self.left <= 0


class Kept:
    """Checkpoints that remember what of a state was saved, and when."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}
        self.unrotated: list[int] = []
        self.distrusted: list[int] = []
        self.close = mock.Mock()

    def save(self, step: int, state: TrainState, rotate: bool) -> None:
        if what := not_finite(digests(state)):
            raise NotFinite(what)
        self.saved[step] = int(state.step)
        self.unrotated += [] if rotate else [step]

    def latest_step(self) -> int | None:
        return max((s for s in self.saved if s not in self.distrusted), default=None)

    def distrust(self, first: int, why: str) -> None:
        self.distrusted += [step for step in self.saved if step >= first]


METRICS = dict.fromkeys("loss grad_norm tokens pairs skipped".split(), 1.0)


def make_train_step(bad: Collection[int] = (5,), broken: int | None = None) -> Any:
    """Some batches are bad; after one, the parameters hold nan."""

    def train_step(state, batch):
        in_row = int(state.guard.skipped_in_row) + 1 if batch in bad else 0
        loss = np.nan if in_row else 1.0
        metrics = METRICS | {"loss": loss, "skipped_in_row": in_row}
        params = {"weight": jnp.float32([1, np.nan, 1])} if batch == broken else None
        return TrainState(
            state.step + 1,
            params or state.params,
            state.optimizer_state,
            state.guard._replace(skipped_in_row=jnp.int32(in_row)),
        ), metrics

    return train_step


def make_loop(
    stop: int | None = None,
    every: tuple = EVERY,
    replay: Any = None,
    say: Callable[[str], None] = lambda line: None,
    train_step: Any = None,
    held_out: Sequence[float] = (1, 3),
) -> Loop:
    report = Report(
        say=say,
        writer=mock.Mock(spec=Sink),
        throughput=Throughput(num_devices=1, peak_flops=None),
        work=lambda tokens, pairs: StepWork(1, 1.0, 1.0),
        learning_rates=STEPS * [0.5],
        total_steps=STEPS,
        every_steps=1,
        stop_after=3,
    )

    def evaluate(parameters, batch):
        return jnp.float32(batch), jnp.float32(2)

    return Loop(
        programs=Programs(train_step or make_train_step(), evaluate, replay),
        to_mesh=lambda blocks: blocks["all"],
        held_out=[{"all": loss} for loss in held_out],
        every=Intervals(*every),
        checkpoints=Kept(),
        report=report,
        goodput=Goodput(),
        profiler=Profiler("", "", say),
        watchdog=Watchdog(0, 0),
        stop=Stop(stop),
    )


def run(loop: Loop, first_step: int = 0) -> int:
    params = {"weight": jnp.ones(3)}
    state = TrainState(jnp.int32(first_step), params, (), initial_guard())
    batches = ((step, {"all": step + 1}) for step in range(first_step, STEPS))
    return loop.run(state, batches, first_step)


@pytest.mark.parametrize(
    "call, first, every, last, saved, points, validated", table("runs.txt", "loop")
)
def test_everything_is_done_at_its_multiples_and_after_the_last_step(
    tmp_path, call, first, every, last, saved, points, validated
):
    said = []
    loop = make_loop(call, every, say=said.append)
    loop.goodput.resume(tmp_path / "goodput.json", 0)
    assert run(loop, first) == last
    assert loop.checkpoints.saved == {step: step for step in saved}
    written = loop.report.writer.scalars.call_args_list
    found = [step for (step, values), _ in written if "wall_time/goodput" in values]
    assert loop.checkpoints.close.called and found == points
    logged = [line for line in said if line.startswith("validation")]
    assert logged == [f"validation loss 1.0000 at step {step}" for step in validated]
    assert f'"step": {last}' in (tmp_path / "goodput.json").read_text()


def test_only_steps_whose_update_was_skipped_are_computed_again():
    again, said = [], []

    def replay(parameters: Any, batch: int) -> Replay:
        again.append(batch)
        return Replay(jnp.float32(np.nan), jnp.float32(1), jnp.uint32(7))

    run(make_loop(replay=replay, say=said.append))
    assert again == [5, 5]
    lines = [line for line in said if "replayed" in line]
    assert len(lines) == 1 and lines[0].startswith("step 5 gives the same")
    # Of parameters that hold nan a replay would say that the data are bad.
    broken = make_loop(replay=replay, train_step=make_train_step({7}, broken=6))
    with pytest.raises(BadSteps, match="weight holds 1 nan.*and not the data"):
        run(broken)
    assert again == [5, 5]


@pytest.mark.parametrize("bad, call, saved, unrotated", table("runs.txt", "waits"))
def test_a_save_waits_for_a_step_that_makes_its_update(bad, call, saved, unrotated):
    loop = make_loop(call, train_step=make_train_step(bad))
    run(loop)
    assert list(loop.checkpoints.saved) == saved
    assert loop.checkpoints.unrotated == unrotated


@pytest.mark.parametrize(
    "bad, broken, stop, distrusted, message", table("runs.txt", "ends")
)
def test_a_run_that_ends_says_where_it_goes_on(bad, broken, stop, distrusted, message):
    loop = make_loop(stop, train_step=make_train_step(bad, broken))
    with pytest.raises(BadSteps, match=message):
        run(loop)
    assert loop.checkpoints.distrusted == distrusted


@pytest.mark.parametrize("broken, bad, message", table("runs.txt", "no-number"))
def test_a_validation_that_gives_no_number_ends_no_run_well(broken, bad, message):
    said = []
    step = make_train_step(bad, broken)
    loop = make_loop(say=said.append, train_step=step, held_out=[1, np.nan])
    with pytest.raises(BadSteps, match=message):
        run(loop)
    lines = [line for line in said if line.startswith("WARNING: validation")]
    steps = () if broken else (3, 6, 9, 10)
    assert lines == [
        f"WARNING: validation loss nan at step {step} from finite parameters"
        for step in steps
    ]


def test_curves_are_those_of_the_page_in_its_order(monkeypatch):
    """TensorBoard sorts groups by name: loss and rates come first, wall time last."""
    monkeypatch.setattr("training.reports.report.peak_bytes", lambda: 1)
    loop = make_loop()
    rates = Throughput(num_devices=1, peak_flops=1e12)
    report = dataclasses.replace(
        loop.report, throughput=rates, held_out_parts=("from_0",)
    )
    programs = dataclasses.replace(
        loop.programs, evaluate=lambda parameters, batch: (jnp.ones(1), jnp.ones(1))
    )
    run(dataclasses.replace(loop, report=report, programs=programs))
    calls = report.writer.scalars.call_args_list
    tags = sorted({tag for (_, values), _ in calls for tag in values})
    groups = list(dict.fromkeys(tag.partition("/")[0] for tag in tags))
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", page, re.MULTILINE)
    assert groups == [group for group, _ in rows]
    assert groups[:2] == ["loss", "perf"] and groups[-1] == "wall_time"
    for group, curves in rows:
        named = {f"{group}/{name}" for name in re.findall(r"`(\w+)`", curves)}
        assert named <= set(tags), group


def test_rates_are_of_the_times_at_which_steps_end():
    """However late the run looks: a GPU without room for more kernels holds it up."""
    now, ended, points = 0.0, threading.Event(), []

    class Clocked(Throughput):
        def wait(self, arrays):
            end = super().wait(arrays)
            ended.set()
            return end

    class Times(Sink):
        def scalars(self, step, values):
            points.append(values.get("perf/step_time"))

    rates = Clocked(num_devices=1, peak_flops=None, clock=lambda: now)
    report = dataclasses.replace(make_loop().report, writer=Times(), throughput=rates)
    for step, now in ((1, 10.0), (2, 12.0), (3, 13.0)):
        ended.clear()
        report.step(step, METRICS | {"skipped_in_row": 0.0})
        assert ended.wait(60)
        now += 100
    report.flush()
    assert points == [None, 2.0, 1.0]


def judged(losses: np.ndarray, sigmas: float) -> list[bool]:
    decide = jax.jit(judge, static_argnums=3)
    guard, results = initial_guard(), []
    for loss in losses.astype(np.float32):
        is_good, guard = decide(guard, loss, np.float32(1), sigmas)
        results.append(bool(is_good))
    return results


def test_a_spike_is_judged_by_mean_and_deviation_of_the_window(rng):
    losses = rng.normal(3, 0.1, 3 * SPIKE_WINDOW)
    at = 2 * SPIKE_WINDOW + 5
    before = losses[at - SPIKE_WINDOW : at]
    for sigmas, expected in ((5.9, True), (6.1, False), (-20, True)):
        losses[at] = before.mean() + sigmas * before.std()
        results = judged(losses, 6.0)
        assert results[at] == expected, sigmas
        assert sum(results) == len(results) - (not expected)


def test_spikes_need_a_full_window_and_to_be_asked_for_and_become_the_usual(rng):
    losses = rng.normal(2, 0.1, SPIKE_WINDOW + 60)
    losses[SPIKE_WINDOW - 1] = 3  # with it the window is full
    losses[SPIKE_WINDOW:] += 7
    results = judged(losses, 6.0)
    assert all(results[:SPIKE_WINDOW]) and not results[SPIKE_WINDOW]
    assert all(results[-30:])
    assert all(judged(losses, 0.0))


@pytest.mark.parametrize("first, second", table("runs.txt", "replays"))
def test_replays_that_differ_end_the_run(first, second):
    found = {"loss": np.nan, "grad_norm": 2.5, "skipped": 7.0, "skipped_in_row": 1}
    with pytest.raises(BadSteps, match="step 4 was computed 3 times.*hardware"):
        compare_replays(4, found, [Replay(*first), Replay(*second)])
