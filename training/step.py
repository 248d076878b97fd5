"""One step of training: gradients of a batch, an update, and its metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from training.digest import device_digest
from training.guard import GuardState, Replay, initial_guard, judge

LossFunction = Callable[[Any, Any], jax.Array]
"""From parameters and a batch to the weighted sum of its losses."""


class TrainState(NamedTuple):
    """Everything that training changes; a plain tree."""

    step: jax.Array  # int32, steps made, those whose update was skipped included
    params: Any
    optimizer_state: optax.OptState
    guard: GuardState


def initial_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, params, optimizer.init(params), initial_guard())


def make_train_step(
    loss_sum: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
    spike_sigmas: float = 0.0,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """Builds `train_step(state, batch) -> (state, metrics)`, to be compiled.

    loss_sum: the batch's weighted loss, summed, not averaged: so microbatches and
      devices with more padding than others count by what they hold.
    microbatches: parts that the batch's rows are cut into; gradients add up in float32
      before the one update.
    spike_sigmas: see `guard.GuardSettings`.

    A step whose loss or gradients are not finite changes nothing but its number and
    what the guard counts: not the parameters, nor any state of the optimizer.

    The batch has `loss_weights` (B, T), `lo` and `hi` (B, T). Metrics: `loss` (mean per
    weighted token, nats), `grad_norm`, `tokens` (all but padding, whatever they weigh),
    `pairs` (of a query and a key that it sees), and of updates skipped so far `skipped`
    and `skipped_in_row`.
    """

    def train_step(
        state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = _mean_gradients(loss_sum, state.params, batch, microbatches)
        norm = optax.tree.norm(grads)
        is_good, guard = judge(state.guard, loss, norm, spike_sigmas)
        updates, optimizer_state = optimizer.update(
            grads, state.optimizer_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        # Chosen where it is written: with the old state donated, no copy is made.
        params, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (params, optimizer_state),
            (state.params, state.optimizer_state),
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "tokens": (batch.hi >= batch.lo).sum(dtype=jnp.float32),
            "pairs": _pairs(batch),
            "skipped": guard.skipped.astype(jnp.float32),
            "skipped_in_row": guard.skipped_in_row.astype(jnp.float32),
        }
        return TrainState(state.step + 1, params, optimizer_state, guard), metrics

    return train_step


def make_replay(
    loss_sum: LossFunction, *, microbatches: int = 1
) -> Callable[[Any, Any], Replay]:
    """Builds `replay(params, batch)`: a step's loss and gradients, digested."""

    def replay(params: Any, batch: Any) -> Replay:
        loss, grads = _mean_gradients(loss_sum, params, batch, microbatches)
        return Replay(loss, optax.tree.norm(grads), device_digest(grads))

    return replay


def make_evaluate_step(
    loss_sum: LossFunction,
) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    """Builds `evaluate(params, batch) -> (summed loss, summed weight)`."""

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return loss_sum(params, batch), batch.loss_weights.sum()

    return evaluate


def _mean_gradients(
    loss_sum: LossFunction, params: Any, batch: Any, microbatches: int
) -> tuple[jax.Array, Any]:
    """Loss and gradients, by weighted token."""
    weight = batch.loss_weights.sum()
    mean = 1 / jnp.where(weight > 0, weight, 1)
    loss, grads = _summed_gradients(loss_sum, params, batch, microbatches)
    return mean * loss, jax.tree.map(lambda g: mean * g, grads)


def _summed_gradients(
    loss_sum: LossFunction, params: Any, batch: Any, microbatches: int
) -> tuple[jax.Array, Any]:
    value_and_grad = jax.value_and_grad(loss_sum)
    if microbatches == 1:
        return value_and_grad(params, batch)

    def split(x: jax.Array) -> jax.Array:
        # Every microbatch takes rows of every device: no row has to move.
        rows = x.reshape(-1, microbatches, *x.shape[1:])
        return jnp.swapaxes(rows, 0, 1)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, value_and_grad(params, part)), None

    zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zero, jax.tree.map(split, batch))[0]


def _pairs(batch: Any) -> jax.Array:
    seen = (batch.hi - batch.lo + 1).clip(0).astype(jnp.float32)
    return seen.sum()
