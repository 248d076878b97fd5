"""Runs the steps of a run, and what happens between them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from training.hosts.preemption import SignalNotice
from training.hosts.watchdog import Watchdog
from training.reports.goodput import Goodput
from training.reports.profiler import Profiler
from training.reports.report import Report
from training.saved.checkpoint import Checkpoints
from training.saved.digest import digests, not_finite
from training.saved.stored_step import NotFinite
from training.step import TrainState
from training.update.guard import BadSteps, Replay, compare_replays, is_finite, outcome


@dataclass(frozen=True)
class Programs:
    """Compiled programs of a run.

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
    """Runs the steps of a run.

    to_mesh: from this host's blocks of a batch to the batch on the mesh.
    held_out: blocks of every batch of a validation; may be empty.
    profiler: traces the steps that are asked for.
    stop: requests the end of the run, and of a validation.
    """

    programs: Programs
    to_mesh: Callable[[Any], Any]
    held_out: Sequence[Any]
    every: Intervals
    checkpoints: Checkpoints
    report: Report
    goodput: Goodput
    watchdog: Watchdog
    profiler: Profiler
    stop: SignalNotice

    def run(self, state: TrainState, batches: Iterator, first_step: int) -> int:
        """Runs the steps after `first_step`, and returns the last that it made.

        That is the last of the run, or, if a stop is requested, an earlier one. All
        checkpoints are complete then.

        Args:
          state: after `first_step`; its memory is taken.
          batches: gives a number and the blocks of every batch from there on.
          first_step: how many steps the run has made.

        Raises:
          BadSteps: it makes no progress, or its state is not finite; says what was
            found. Such a state is not saved: the newest checkpoint is from before.
          OSError: a checkpoint could not be saved, or a batch not be read.
        """
        last_step = self.report.total_steps
        self.goodput.switch("step")
        saves = False
        for step in range(first_step + 1, last_step + 1):
            with self.goodput.spend("data"):
                _, blocks = next(batches)
                batch = self.to_mesh(blocks)
            # Takes the state's memory: nothing may read the old one from here on.
            with self.profiler.step(step, after=state.step):
                state, metrics = self.programs.train_step(state, batch)
            self.profiler.stop_after(step, metrics)
            try:
                self._follow(step, state, batch, metrics)
                # Every process asks in the same places, as calls are counted: so all of
                # them stop after the same step.
                if self.stop.requested():
                    last_step = step
                saves |= _is_due(step, self.every.save, last_step)
                # A save that is put off, as updates are skipped, stays due.
                if saves:
                    saves = not self._save(step, state, metrics, step == last_step)
                if step == last_step:
                    self.report.flush()
            except (BadSteps, NotFinite) as error:
                self.watchdog.pause()
                raise self._diagnosis(error, step, state) from error
            if _is_due(step, self.every.log, last_step):
                self.report.writer.scalars(step, self.goodput.points())
            if step == last_step:
                break
        with self.goodput.spend("save"):
            self.checkpoints.close()
        self.goodput.record(step)
        return step

    def _follow(self, step: int, state: TrainState, batch: Any, metrics: Any) -> None:
        """Reports on a step; raises BadSteps or NotFinite where the run must end."""
        self.report.step(step, metrics)
        self._look_at_skipped(step, state, batch)
        self.watchdog.step()
        self.goodput.step(step)
        last_step = self.report.total_steps
        loss = None
        if self.held_out and _is_due(step, self.every.validate, last_step):
            loss = self._validate(step, state, metrics)
        if step == last_step:
            self._check_the_end(step, loss)

    def _diagnosis(self, error: Exception, step: int, state: TrainState) -> BadSteps:
        """Finds out why a run ends, and moves bad checkpoints away.

        Saved states are finite, but finite parameters can be useless too: checkpoints
        move away if no step since their update gave a finite loss.

        error: what ends the run. step, state: the last step, and what it left.

        Returns:
          The error to raise: what was found, and where the same command resumes.
        """
        newest = self.checkpoints.latest_step()
        if what := not_finite(digests(state)):
            cause = (
                f"the run ends: {what}, since a step between {newest or 0} and {step}. "
                "Lower config.optimizer.peak_lr if this comes back at the same step; "
                "if it does not, suspect the hardware, and not the data"
            )
        else:
            made = int(state.step) - int(state.guard.skipped_in_row)
            cause = f"{error}. The state is finite, as step {made} left it"
            last = self.report.last
            in_row = int(last["skipped_in_row"])
            if in_row >= self.report.stop_after and not is_finite(last):
                why = f"loss {last['loss']} after {in_row} skipped updates"
                self.checkpoints.distrust(made, why)
                newest = self.checkpoints.latest_step()
        where = "starts over" if newest is None else f"resumes from step {newest}"
        return BadSteps(f"{cause}. The same command {where}")

    def _check_the_end(self, step: int, held_out_loss: float | None) -> None:
        """Raises BadSteps where the last parameters are not known to be of use.

        A single bad batch at the end is no error if the held-out loss is finite.
        """
        self.report.flush()
        last = self.report.last
        forgiven = 0 if held_out_loss is None else 1
        if last["skipped_in_row"] > forgiven and not is_finite(last):
            what = outcome(step, last)
        elif held_out_loss is not None and not math.isfinite(held_out_loss):
            what = f"validation loss {held_out_loss}"
        else:
            return
        raise BadSteps(
            f"the run would end with {what}: lower config.optimizer.peak_lr, look at "
            "the data, or end before this step (config.train.steps)"
        )

    def _look_at_skipped(self, step: int, state: TrainState, batch: Any) -> None:
        """Looks for the cause of a skipped update: in the state, then by replays.

        Without replays it looks a step later, as the run does not wait for metrics.
        """
        if self.programs.replay is not None:
            self.report.flush()
        metrics = self.report.last
        if not metrics.get("skipped_in_row"):
            return
        # At the first in a row only, as no later one has changed the state since.
        if metrics["skipped_in_row"] == 1:
            self._check(state)
        if self.programs.replay is not None:
            replays = [self.programs.replay(state.params, batch) for _ in range(2)]
            self.report.say(compare_replays(step, metrics, jax.device_get(replays)))

    def _check(self, state: TrainState) -> None:
        self.watchdog.pause()
        if what := not_finite(digests(state)):
            raise NotFinite(what)

    def _validate(self, step: int, state: TrainState, metrics: Any) -> float | None:
        """Returns the held-out loss; None if a stop is requested."""
        self.report.flush()
        self.watchdog.pause()
        pause = self.report.throughput.exclude(after=metrics)
        with pause, self.goodput.spend("evaluation"):
            # Before each batch, as often on every process: they count these calls.
            sums = []
            while len(sums) < len(self.held_out) and not self.stop.requested():
                batch = self.to_mesh(self.held_out[len(sums)])
                sums.append(jax.device_get(self.programs.evaluate(state.params, batch)))
            if len(sums) < len(self.held_out):
                return None
            loss = self.report.validation(step, sums)
        if not math.isfinite(loss):
            self._check(state)
            self.report.say(
                f"WARNING: validation loss {loss} at step {step} from finite parameters"
            )
        return loss

    def _save(self, step: int, state: TrainState, metrics: Any, is_last: bool) -> bool:
        """Begins a checkpoint; returns when the state may change again.

        Returns:
          Whether it began one. While updates are skipped there is nothing new to save,
          except after the last step; and no older checkpoint is deleted, as it may be
          from before a fault.
        """
        # Metrics of this step, which say whether there is anything new in the state.
        self.report.flush()
        is_skipped = bool(self.report.last["skipped_in_row"])
        if is_skipped and not is_last:
            return False
        self.watchdog.pause()
        pause = self.report.throughput.exclude(after=metrics)
        with pause, self.goodput.spend("save"):
            self.report.writer.flush()  # a run killed after the save resumes from here
            self.checkpoints.save(step, state, rotate=not is_skipped)
        self.goodput.record(step)
        return True


def _is_due(step: int, every_steps: int, last_step: int) -> bool:
    """Returns whether it is due: at multiples and after the last step; 0 is never."""
    return every_steps > 0 and (step % every_steps == 0 or step == last_step)
