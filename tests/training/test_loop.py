"""The loop: what is done after which step, and where it stops."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from training.goodput import Goodput
from training.guard import Replay, Watch
from training.loop import Intervals, Loop, Programs
from training.metrics import NullWriter, StepWork, Throughput
from training.profiler import Profiler
from training.report import Report
from training.step import TrainState
from training.watchdog import Watchdog

STEPS = 10
EVERY = Intervals(log=2, validate=3, save=4)


class Told:
    """A notice that arrives at a call of `arrived`; None for never."""

    def __init__(self, call: int | None = None):
        self.calls, self.call = 0, call

    def arrived(self) -> bool:
        self.calls += 1
        return self.call is not None and self.calls >= self.call

    def __enter__(self) -> "Told":
        return self

    def __exit__(self, *_: object) -> None: ...


class Points(NullWriter):
    """Keeps the steps at which goodput was told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def scalars(self, step: int, values: Any) -> None:
        if "goodput/fraction" in values:
            self.steps.append(step)


class Kept:
    """Checkpoints that remember what of a state was saved, and when."""

    def __init__(self) -> None:
        self.saved: dict[int, int] = {}
        self.closed = False

    def save(self, step: int, state: TrainState) -> None:
        self.saved[step] = int(state.step)

    def close(self) -> None:
        self.closed = True


def train_step(state: TrainState, batch: int) -> tuple[TrainState, dict[str, Any]]:
    """Batch 5 is a bad one."""
    skipped = float(batch == 5)
    names = "loss grad_norm tokens pairs skipped skipped_in_row".split()
    metrics = dict.fromkeys(names, 1.0)
    metrics |= {"skipped": skipped, "skipped_in_row": skipped}
    return state._replace(step=state.step + 1), metrics


def evaluate(parameters: Any, batch: int) -> tuple[Any, Any]:
    return jnp.float32(batch), jnp.float32(2)


def make_loop(
    told: Told,
    every: Intervals = EVERY,
    replay: Callable[[Any, Any], Replay] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Loop:
    report = Report(
        say=say,
        writer=Points(),
        throughput=Throughput(num_devices=1, peak_flops=None),
        work=lambda tokens, pairs: StepWork(1, 1.0, 1.0),
        schedule=lambda step: jnp.float32(0.5),
        total_steps=STEPS,
        every_steps=1,
        watch=Watch(3, lambda line: None),
    )
    return Loop(
        programs=Programs(train_step, evaluate, replay),
        place=lambda blocks: blocks["all"],
        held_out=[{"all": 1}, {"all": 3}],
        every=every,
        checkpoints=Kept(),
        report=report,
        goodput=Goodput(),
        profiler=Profiler.of("", "", say),
        watchdog=Watchdog(0, 0),
        told=told,
    )


def run(loop: Loop, first_step: int = 0) -> int:
    state = TrainState(jnp.int32(first_step), {}, (), None)
    batches = ((step, {"all": step + 1}) for step in range(first_step, STEPS))
    return loop.run(state, batches, first_step)


def test_everything_is_done_at_its_multiples_and_after_the_last_step() -> None:
    said = []
    loop = make_loop(Told(), say=said.append)
    assert run(loop) == STEPS
    assert loop.checkpoints.saved == {4: 4, 8: 8, 10: 10} and loop.checkpoints.closed
    assert loop.report.writer.steps == [2, 4, 6, 8, 10]
    told = [line for line in said if line.startswith("validation")]
    assert told == [f"validation loss 1.0000 at step {step}" for step in (3, 6, 9, 10)]


def test_a_run_that_goes_on_begins_after_its_first_step() -> None:
    loop = make_loop(Told())
    assert run(loop, first_step=7) == STEPS
    assert loop.checkpoints.saved == {8: 8, 10: 10}


def test_a_run_that_is_told_to_stop_saves_there_and_has_goodput_told() -> None:
    # Once a step, and before each of the two held-out batches after step 3.
    loop = make_loop(Told(7))
    assert run(loop) == 5
    assert loop.checkpoints.saved == {4: 4, 5: 5} and loop.checkpoints.closed
    assert loop.report.writer.steps == [2, 4, 5]


def test_a_validation_that_is_cut_short_is_not_told() -> None:
    said = []
    loop = make_loop(Told(4), say=said.append)
    assert run(loop) == 3
    assert loop.checkpoints.saved == {3: 3}
    assert not any(line.startswith("validation") for line in said)


@pytest.mark.parametrize("stop", [None, 2])
def test_what_is_done_every_0_steps_is_never_done(stop: int | None) -> None:
    loop = make_loop(Told(stop), Intervals(log=1, validate=0, save=0))
    assert run(loop) == (stop or STEPS)
    assert loop.checkpoints.saved == {} and loop.checkpoints.closed


def test_only_steps_whose_update_was_skipped_are_computed_again() -> None:
    again, said = [], []

    def replay(parameters: Any, batch: int) -> Replay:
        again.append(batch)
        return Replay(jnp.float32(1), jnp.float32(1), jnp.uint32(7))

    run(make_loop(Told(), replay=replay, say=said.append))
    assert again == [5, 5]
    told = [line for line in said if "replayed" in line]
    assert len(told) == 1 and told[0].startswith("step 5 gives the same")


def test_goodput_is_recorded_when_a_run_ends(tmp_path: Path) -> None:
    loop = make_loop(Told())
    loop.goodput.resume(tmp_path / "goodput.json", 0)
    run(loop)
    assert f'"step": {STEPS}' in (tmp_path / "goodput.json").read_text()
