"""One step of training: gradients of a batch, an update, and its metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

LossFunction = Callable[[Any, Any], jax.Array]
"""From parameters and a batch to the weighted sum of its losses."""


class TrainState(NamedTuple):
    """Everything that training changes; a plain tree."""

    step: jax.Array  # int32, updates made
    params: Any
    optimizer_state: optax.OptState


def initial_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def make_train_step(
    loss_sum: LossFunction,
    optimizer: optax.GradientTransformation,
    *,
    microbatches: int = 1,
) -> Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]:
    """Builds `train_step(state, batch) -> (state, metrics)`, to be compiled.

    loss_sum: the batch's weighted loss, summed, not averaged: so microbatches and
      devices with more padding than others count by what they hold.
    microbatches: parts that the batch's rows are cut into; gradients add up in float32
      before the one update.

    The batch has `loss_weights` (B, T), `lo` and `hi` (B, T). Metrics: `loss` (mean per
    weighted token, nats), `grad_norm`, `tokens` (all but padding, whatever they weigh)
    and `pairs` (of a query and a key that it sees).
    """

    def train_step(
        state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        weight = batch.loss_weights.sum()
        mean = 1 / jnp.where(weight > 0, weight, 1)
        loss, grads = _summed_gradients(loss_sum, state.params, batch, microbatches)
        grads = jax.tree.map(lambda g: mean * g, grads)
        updates, optimizer_state = optimizer.update(
            grads, state.optimizer_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": mean * loss,
            "grad_norm": optax.tree.norm(grads),
            "tokens": (batch.hi >= batch.lo).sum(dtype=jnp.float32),
            "pairs": _pairs(batch),
        }
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return train_step


def make_evaluate_step(
    loss_sum: LossFunction,
) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    """Builds `evaluate(params, batch) -> (summed loss, summed weight)`."""

    def evaluate(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        return loss_sum(params, batch), batch.loss_weights.sum()

    return evaluate


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
