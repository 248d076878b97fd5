"""Reports the progress of a run: console lines and points of its curves."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from training.reports.metrics import StepWork, Throughput, peak_bytes
from training.reports.sinks import Sink
from training.update.guard import check_skipped


@dataclass
class Report:
    """Follows the steps of a run, one behind, so that the devices never wait for it.

    say: prints a line.
    writer: takes the points.
    throughput: measures rates.
    work: from tokens and visible pairs of a step to what the step does.
    learning_rates: of the updates of the whole run.
    total_steps: of the whole run.
    every_steps: between lines; the first step gets one too.
    stop_after: skipped updates in a row that end the run.
    parts: names of the parts of the loss, where it has any.
    held_out_parts: names of the parts that validations report.
    """

    say: Callable[[str], None]
    writer: Sink
    throughput: Throughput
    work: Callable[[float, float], StepWork]
    learning_rates: Sequence[float]
    total_steps: int
    every_steps: int
    stop_after: int
    parts: Sequence[str] = ()
    held_out_parts: Sequence[str] = ()

    def __post_init__(self):
        self.last: dict[str, float] = {}
        self._pending: tuple[int, Mapping[str, jax.Array], Future[float]] | None = None
        self._begun = False
        # Another thread takes the time of a step's end: this one may be held up until
        # a GPU has room for all kernels of the next step.
        self._timer = ThreadPoolExecutor(1, "step-end")

    def step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Takes the metrics of a step that runs, and reports on the one before."""
        # One step behind: waiting for this one would leave the devices idle.
        self.flush()
        end = self._timer.submit(self.throughput.wait, metrics)
        self._pending = step, metrics, end

    def flush(self) -> None:
        """Waits for the last step's metrics and reports on it.

        Raises:
          BadSteps: too many updates in a row were skipped.
        """
        if self._pending is None:
            return
        step, arrays, end = self._pending
        self._pending = None  # first, as what raises here must not be reported again
        arrays = jax.device_get(dict(arrays))
        parts = _named(self.parts, arrays.pop("loss_parts", ()))
        metrics = {name: float(x) for name, x in arrays.items()} | parts
        self.throughput.count(self.work(metrics["tokens"], metrics["pairs"]))
        self.last |= metrics
        if not self._begun or step % self.every_steps == 0 or step == self.total_steps:
            self._begun = True
            self._write(step, metrics, self.throughput.report(end.result()))
        check_skipped(step, metrics, self.stop_after, self.say)

    def validation(
        self, step: int, sums: Sequence[tuple[jax.Array, jax.Array]]
    ) -> float:
        """Reports on held-out batches after a step, and gives their mean loss.

        sums: of each batch, the summed losses and the summed weights.
        """
        self.flush()
        losses = np.zeros((), np.float32)
        weights = np.zeros((), np.float32)
        for batch_losses, batch_weights in jax.device_get(sums):
            losses = losses + batch_losses
            weights = weights + batch_weights
        # Of all batches together: a mean of their means would weigh a token more, the
        # fewer of them its batch has.
        loss = float(losses.sum() / max(weights.sum(), 1))
        points = {"loss/validation": loss}
        if self.held_out_parts:
            means = losses / np.where(weights > 0, weights, np.nan)
            parts = _named(self.held_out_parts, means)
            points |= {f"validation/{name}": mean for name, mean in parts.items()}
        self.last["validation_loss"] = loss
        self.say(f"validation loss {loss:.4f} at step {step}")
        self.writer.scalars(step, points)
        return loss

    def _write(
        self, step: int, metrics: dict[str, float], rates: dict[str, float]
    ) -> None:
        metrics = metrics | {"learning_rate": float(self.learning_rates[step - 1])}
        self.say(console_line(step, self.total_steps, metrics | rates))
        parts = [f"loss_{name}" for name in self.parts]
        names = ["grad_norm", *parts, "learning_rate", "skipped"]
        names += [name for name in metrics if name.startswith("experts_")]
        # TensorBoard sorts groups by name, and unfolds the first two: loss and perf.
        points = {"loss/train": metrics["loss"]}
        points |= {f"train/{name}": metrics[name] for name in names}
        if (peak := peak_bytes()) is not None:
            points["perf/peak_bytes"] = peak
        self.writer.scalars(step, points | rates)


def _named(
    part_names: Sequence[str], losses: Sequence[float] | np.ndarray
) -> dict[str, float]:
    named = zip(part_names, losses, strict=True)
    return {f"loss_{name}": float(loss) for name, loss in named}


def console_line(step: int, total_steps: int, values: Mapping[str, float]) -> str:
    """Formats one line on the state of the run.

    step: updates made, of `total_steps` of the whole run.
    values: `loss`, a mean over the step's tokens in the unit of the task; `grad_norm`,
      before clipping; `learning_rate`; and what `Throughput.report` gave.
    """
    parts = [
        f"step {step:{len(str(total_steps))}d}/{total_steps}",
        f"loss {values['loss']:.4f}",
        f"grad {values['grad_norm']:.3g}",
        f"lr {values['learning_rate']:.1e}",
    ]
    if "perf/tokens_per_second" in values:
        parts.append(f"{_short(values['perf/tokens_per_second'])} tok/s")
    if "perf/mfu" in values:
        parts.append(f"MFU {100 * values['perf/mfu']:.1f} %")
    if "perf/step_time" in values:
        parts.append(f"ETA {_hours((total_steps - step) * values['perf/step_time'])}")
    return "  ".join(parts)


def _short(number: float) -> str:
    """Formats with one decimal and a prefix: 950.0, 41.2k, 3.4M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Half a last digit early, so that 999 999 is 1.0M and not 1000.0k.
        if number >= 0.99995 * size:
            return f"{number / size:.1f}{prefix}"
    return f"{number:.1f}"


def _hours(seconds: float) -> str:
    """Formats h:mm:ss; days are hours too, so that lines of one run compare."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
