"""Keeps bad steps out of a run: their updates are skipped, and may be replayed.

A step whose loss or gradients are not finite makes no update. If a run asks for it,
neither does one whose loss is far above those of the steps before. The choice is made
on the devices, element by element, so that no second copy of the parameters exists.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SPIKE_WINDOW = 128
"""Steps whose losses say what is usual."""


class GuardState(NamedTuple):
    """State of the guard; part of the train state, so that resumes are exact."""

    skipped: jax.Array  # int32, updates skipped in all
    skipped_in_row: jax.Array  # int32, of these, the latest without one made between
    losses: jax.Array  # float32 (SPIKE_WINDOW,), finite ones; the newest last
    seen: jax.Array  # int32, how many finite losses there were


def initial_guard() -> GuardState:
    """Returns the state before the first step."""
    # A zero each: the state is donated, and a buffer cannot be donated twice.
    return GuardState(
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_row=jnp.zeros((), jnp.int32),
        losses=jnp.zeros(SPIKE_WINDOW, jnp.float32),
        seen=jnp.zeros((), jnp.int32),
    )


@dataclass(frozen=True)
class GuardSettings:
    """Settings of skipped updates, and of when a run ends.

    Attributes:
      spike_sigmas: skip updates whose loss is above the mean of the last SPIKE_WINDOW
        finite ones by more than this many standard deviations; 0 skips for no spike.
        The rule of OLMo (arXiv 2501.00656).
      stop_after: skipped updates in a row that end the run.
      first_step_seconds, step_seconds: see `watchdog.Watchdog`.
      replay: a step that is skipped is computed twice more, to separate a fault of the
        hardware from one of the data. The run then waits for every step.

    Raises:
      ValueError: for a value outside its range.
    """

    spike_sigmas: float = 0.0
    stop_after: int = 10
    first_step_seconds: float = 0.0
    step_seconds: float = 0.0
    replay: bool = False

    def __post_init__(self) -> None:
        wrong = []
        for name in "spike_sigmas", "first_step_seconds", "step_seconds":
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                wrong.append(f"{name}={value} must be at least 0, and finite")
        if self.stop_after < 1:
            wrong.append(f"stop_after={self.stop_after} must be at least 1")
        if wrong:
            raise ValueError("; ".join(wrong))


def judge(
    guard: GuardState, loss: jax.Array, grad_norm: jax.Array, spike_sigmas: float
) -> tuple[jax.Array, GuardState]:
    """Returns whether to make the update (bool scalar), and the new guard state.

    loss, grad_norm: of this step, float32 scalars.
    """
    # The norm too: gradients may overflow where the loss is still a number.
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    is_good = is_finite & ~_is_spike(guard, loss, spike_sigmas)
    newer = jnp.append(guard.losses[1:], loss.astype(jnp.float32))
    # Spikes are remembered, so that a lasting change becomes the usual; what is not
    # finite is not, or the mean would be nan and no later step a spike.
    return is_good, GuardState(
        skipped=guard.skipped + (~is_good).astype(jnp.int32),
        skipped_in_row=jnp.where(is_good, 0, guard.skipped_in_row + 1),
        losses=jnp.where(is_finite, newer, guard.losses),
        seen=guard.seen + is_finite.astype(jnp.int32),
    )


def _is_spike(guard: GuardState, loss: jax.Array, spike_sigmas: float) -> jax.Array:
    if not spike_sigmas:
        return jnp.zeros((), bool)
    # Until the window is full it holds zeros, which would lower the mean.
    limit = guard.losses.mean() + spike_sigmas * guard.losses.std()
    return (guard.seen >= SPIKE_WINDOW) & (loss > limit)


class BadSteps(FloatingPointError):
    """A run that makes no progress: too many updates skipped, or faulty hardware."""


def check_skipped(
    step: int, metrics: Mapping[str, float], stop_after: int, say: Callable[[str], None]
) -> None:
    """Logs a step whose update was skipped, by its metrics.

    Raises:
      BadSteps: `stop_after` updates in a row were skipped.
    """
    in_row = int(metrics["skipped_in_row"])
    if not in_row:
        return
    what = outcome(step, metrics)
    if in_row >= stop_after:
        raise BadSteps(
            f"{what}, and {in_row} skipped updates in a row: lower "
            "config.optimizer.peak_lr, look at the data of these steps, or raise "
            "config.guard.stop_after"
        )
    say(f"WARNING: {what}: no update ({in_row} in a row)")


def outcome(step: int, metrics: Mapping[str, float]) -> str:
    """Describes what a step gave, in a few words."""
    loss = metrics["loss"]
    norm = metrics["grad_norm"]
    return f"loss {loss:.4g} and gradients of norm {norm:.4g} at step {step}"


def is_finite(metrics: Mapping[str, float]) -> bool:
    """Returns whether a step gave a finite loss and finite gradients."""
    return math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])


class Replay(NamedTuple):
    """Loss and gradients of a step, without its update."""

    loss: jax.Array
    grad_norm: jax.Array
    digest: jax.Array  # of all gradients


def compare_replays(
    step: int, metrics: Mapping[str, float], replays: Sequence[Replay]
) -> str:
    """Compares a skipped step with its replays, where its state is finite.

    Args:
      step: its number.
      metrics: of its first time; of another program, so the last bits may differ.
      replays: each from the parameters and the batch of the first time.

    Raises:
      BadSteps: the results differ, so something other than the data is at fault.
    """
    first = metrics["loss"], metrics["grad_norm"]
    again = [(float(replay.loss), float(replay.grad_norm)) for replay in replays]
    # Replays are one program, so all their bits agree; the first time was another's.
    is_same = len({int(replay.digest) for replay in replays}) == 1
    if not is_same or not np.allclose(again, first, rtol=1e-2, equal_nan=True):
        pairs = ", ".join(f"({loss:.6g}, {norm:.6g})" for loss, norm in [first, *again])
        raise BadSteps(
            f"step {step} was computed {1 + len(again)} times from the same parameters "
            f"and data, with other results each time: loss and gradient norm {pairs}. "
            "Suspect the hardware, or a kernel that is not deterministic "
            "(config.implementation)"
        )
    return (
        f"step {step} gives the same when replayed, and its parameters are finite: "
        "look at its data or at config.optimizer.peak_lr, not at chips"
    )
