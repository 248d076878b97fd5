"""The steps of a run, and what happens between them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from training.checkpoint import Checkpoints
from training.goodput import Goodput
from training.guard import Replay, compare_replays
from training.preemption import Notice
from training.profiler import Profiler
from training.report import Report
from training.step import TrainState
from training.watchdog import Watchdog


@dataclass(frozen=True)
class Programs:
    """What a run computes.

    train_step: from state and batch to state and metrics; takes the old state's place.
    evaluate: from parameters and a held-out batch to summed losses and weights.
    replay: from parameters and a batch to what their step computed; None where no step
      is computed again.
    """

    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any, Any], tuple[jax.Array, jax.Array]]
    replay: Callable[[Any, Any], Replay] | None


@dataclass(frozen=True)
class Intervals:
    """Steps between lines and points, validations, and checkpoints; 0 for none."""

    log: int
    validate: int
    save: int


@dataclass(frozen=True)
class Loop:
    """What makes the steps of a run.

    place: from this host's blocks of a batch to the batch on the mesh.
    held_out: blocks of every batch of a validation; may be empty.
    profiler: traces the steps that are asked for.
    told: says when to stop, and stops validations too.
    """

    programs: Programs
    place: Callable[[Any], Any]
    held_out: Sequence[Any]
    every: Intervals
    checkpoints: Checkpoints
    report: Report
    goodput: Goodput
    watchdog: Watchdog
    profiler: Profiler
    told: Notice

    def run(self, state: TrainState, batches: Iterator, first_step: int) -> int:
        """Makes the steps after the first one, and gives the last that it made.

        That is the last of the run, or, if it is told to stop, an earlier one. All
        checkpoints are complete then.

        Args:
          state: after `first_step`; its memory is taken.
          batches: gives a number and the blocks of every batch from there on.
          first_step: how many steps the run has made.

        Raises:
          BadSteps: it makes no progress.
          OSError: a checkpoint could not be saved, or a batch not be read.
        """
        last_step = self.report.total_steps
        self.goodput.switch("step")
        for step in range(first_step + 1, last_step + 1):
            with self.goodput.spend("data"):
                _, blocks = next(batches)
                batch = self.place(blocks)
            with self.profiler.step(step, after=state.step):
                state, metrics = self.programs.train_step(state, batch)
            self.profiler.stop_after(step, metrics)
            self.report.step(step, metrics)
            self._replay_if_skipped(step, state, batch)
            self.watchdog.step()
            self.goodput.step(step)
            if self.held_out and _is_due(step, self.every.validate, last_step):
                self._validate(step, state, metrics)
            if self.told.arrived():
                last_step = step
            if _is_due(step, self.every.save, last_step):
                self._save(step, state, metrics)
            if _is_due(step, self.every.log, last_step):
                self.report.writer.scalars(step, self.goodput.points())
            if step == last_step:
                break
        self.report.flush()
        with self.goodput.spend("save"):
            self.checkpoints.close()
        self.goodput.record(step)
        return step

    def _replay_if_skipped(self, step: int, state: TrainState, batch: Any) -> None:
        """Computes a step again whose update was skipped, and tells what that says."""
        if self.programs.replay is None:
            return
        self.report.flush()
        metrics = self.report.last
        if metrics["skipped_in_row"]:
            replays = [self.programs.replay(state.params, batch) for _ in range(2)]
            self.report.say(compare_replays(step, metrics, jax.device_get(replays)))

    def _validate(self, step: int, state: TrainState, metrics: Any) -> None:
        """Reports on the held-out batches, unless the run is told to stop."""
        self.report.flush()
        self.watchdog.pause()
        pause = self.report.throughput.exclude(after=metrics)
        with pause, self.goodput.spend("evaluation"):
            sums = []
            while len(sums) < len(self.held_out) and not self.told.arrived():
                batch = self.place(self.held_out[len(sums)])
                sums.append(jax.device_get(self.programs.evaluate(state.params, batch)))
            if len(sums) == len(self.held_out):
                self.report.validation(step, sums)

    def _save(self, step: int, state: TrainState, metrics: Any) -> None:
        """Begins a checkpoint; returns when the state may change again."""
        self.report.flush()
        self.watchdog.pause()
        pause = self.report.throughput.exclude(after=metrics)
        with pause, self.goodput.spend("save"):
            self.report.writer.flush()  # a run killed after the save resumes from here
            self.checkpoints.save(step, state)
        self.goodput.record(step)


def _is_due(step: int, every_steps: int, last_step: int) -> bool:
    """At multiples and after the last step; every 0 steps: never."""
    return every_steps > 0 and (step % every_steps == 0 or step == last_step)
