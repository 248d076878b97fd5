"""One step of training: gradients of a batch, an update, and its metrics."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from training.saved.digest import device_digest
from training.update.at_once import Optimizer, float32, global_norm
from training.update.guard import GuardState, Replay, initial_guard, judge


class Losses(NamedTuple):
    """The losses of a batch, and what a model says of itself beside them.

    losses: weighted and summed, a scalar or (parts,). beside: scalar, minimised with
      them. figures: scalars, metrics by name. Both times the batch's summed weights.
    """

    losses: jax.Array
    beside: jax.Array
    figures: dict[str, jax.Array]


LossFunction = Callable[..., jax.Array | Losses]
"""From parameters, a batch and frozen parameters to the weighted sum of its losses.

Frozen are those that are not trained: nothing, where all are. The sum is a scalar, or
those of several parts of the batch, (parts,)."""


class Counts(NamedTuple):
    """Contents of a batch, float32.

    tokens: all but padding, whatever their weights. pairs: visible query-key pairs, a
      mean over layers. weights: summed, for each part of the loss.
    """

    tokens: jax.Array
    pairs: jax.Array
    weights: jax.Array


def count_tokens(batch: Any, windows: Sequence[int] = (0,)) -> Counts:
    """Counts a batch with `loss_weights`, `positions`, `k_start` and `k_end`, [B, T].

    The last two may be [B, T, m], of intervals that share no key.

    windows: of the layers: tokens that a query sees; 0 for all that the batch shows it.
    """
    seen = (batch.k_end - batch.k_start).clip(0)  # (B, T) or (B, T, m)
    # The intervals of a token share no key, so that each key counts once.
    seen = seen.reshape(*batch.positions.shape, -1).sum(-1)
    behind = jnp.minimum(seen, batch.positions + 1)  # a window shows nothing ahead
    tokens = (seen > 0).sum(dtype=jnp.float32)
    pairs = mean_pairs(seen, behind, windows)
    return Counts(tokens, pairs, batch.loss_weights.sum())


def mean_pairs(seen: jax.Array, behind: jax.Array, windows: Sequence[int]) -> jax.Array:
    """Returns the visible query-key pairs, a mean over layers: float32 scalar.

    seen: int32, the keys that each query sees in layers without a window.
    behind: how many of them end with its own; of the same shape.
    windows: as of `count_tokens`.
    """
    pairs = jnp.zeros((), jnp.float32)
    for window, layers in Counter(windows).items():
        keys = jnp.minimum(behind, window) if window else seen
        pairs += layers / len(windows) * keys.sum(dtype=jnp.float32)
    return pairs


class TrainState(NamedTuple):
    """Everything that training changes; a plain tree."""

    step: jax.Array  # int32, steps made, those whose update was skipped included
    params: Any  # those that are trained
    optimizer_state: Any
    guard: GuardState


def initial_state(params: Any, optimizer: Optimizer) -> TrainState:
    """Returns the state before the first step."""
    params = optimizer.cast(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer_state=optimizer.init(params),
        guard=initial_guard(),
    )


def make_train_step(
    loss_sum: LossFunction,
    optimizer: Optimizer,
    *,
    microbatches: int = 1,
    spike_sigmas: float = 0.0,
    count: Callable[[Any], Counts] = count_tokens,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
    """Builds `train_step(state, batch, *frozen) -> (state, metrics)`, to be compiled.

    loss_sum: the batch's weighted loss, summed, not averaged: so microbatches and
      devices with more padding than others count by what they hold.
    microbatches: parts that the batch's rows are cut into; gradients add up in float32
      before the one update.
    spike_sigmas: see `guard.GuardSettings`.
    count: what is in a batch; its weights are of the parts of the loss.

    A step whose loss or gradients are not finite changes nothing but its number and
    what the guard counts: not the parameters, nor any state of the optimizer.

    Metrics: `loss` (mean per weight: nats of a token, say), `grad_norm`, `tokens` and
    `pairs` (see `Counts`), and of updates skipped so far `skipped` and
    `skipped_in_row`; where the loss has parts, `loss_parts`, the mean of each, nan for
    one without weight; and the figures of `Losses`.
    """

    def train_step(
        state: TrainState, batch: Any, *frozen: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        tokens, pairs, weights = count(batch)
        loss, losses, figures, grads = _mean_gradients(
            loss_sum, state.params, batch, frozen, microbatches, weights
        )
        # Before clipping: what the guard judges is what the batch gave.
        norm = global_norm(grads)
        is_good, guard = judge(state.guard, loss, norm, spike_sigmas)
        params, optimizer_state = optimizer.update(
            grads, state.optimizer_state, state.params, is_good
        )
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "tokens": tokens,
            "pairs": pairs,
            "skipped": guard.skipped.astype(jnp.float32),
            "skipped_in_row": guard.skipped_in_row.astype(jnp.float32),
            **figures,
        }
        if losses.ndim:
            metrics["loss_parts"] = losses / weights
        # A step that is skipped counts: its batch is not read again.
        return TrainState(state.step + 1, params, optimizer_state, guard), metrics

    return train_step


def make_replay(
    loss_sum: LossFunction,
    *,
    microbatches: int = 1,
    count: Callable[[Any], Counts] = count_tokens,
) -> Callable[..., Replay]:
    """Builds `replay(params, batch, *frozen)`: a digest of its loss and gradients."""

    def replay(params: Any, batch: Any, *frozen: Any) -> Replay:
        weights = count(batch).weights
        loss, _, _, grads = _mean_gradients(
            loss_sum, params, batch, frozen, microbatches, weights
        )
        norm = global_norm(grads)
        return Replay(loss, norm, device_digest(grads))

    return replay


def make_evaluate_step(
    loss_sum: LossFunction, count: Callable[[Any], Counts] = count_tokens
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Builds `evaluate(params, batch, *frozen) -> (summed losses, summed weights)`."""

    def evaluate(params: Any, batch: Any, *frozen: Any) -> tuple[jax.Array, jax.Array]:
        losses = loss_sum(params, batch, *frozen)
        assert isinstance(losses, jax.Array)  # nothing beside, as nothing is trained
        # Sums of both: batches count by what they hold, not each as one.
        return losses, count(batch).weights

    return evaluate


def _mean_gradients(
    loss_sum: LossFunction,
    params: Any,
    batch: Any,
    frozen: tuple,
    microbatches: int,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], Any]:
    """Returns the mean loss by weight, the sums of its parts, figures, and gradients.

    Gradients are of all that is minimised, and the loss is that of the losses alone.
    """
    # By the whole batch's weight, also in microbatches: a mean of their means would
    # weigh a token more, the more padding is beside it.
    weight = weights.sum()
    mean = 1 / jnp.where(weight > 0, weight, 1)

    def mean_loss(params: Any, batch: Any) -> tuple[jax.Array, tuple[jax.Array, dict]]:
        given = loss_sum(params, batch, *frozen)
        if isinstance(given, Losses):
            total = given.losses.sum() + given.beside
            figures = {name: mean * value for name, value in given.figures.items()}
            return mean * total, (given.losses, figures)
        return mean * given.sum(), (given, {})

    value_and_grad = jax.value_and_grad(mean_loss, has_aux=True)
    if microbatches == 1:
        (_, (losses, figures)), grads = value_and_grad(params, batch)
        return mean * losses.sum(), losses, figures, grads

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        (_, counted), grads = value_and_grad(params, part)
        return jax.tree.map(jnp.add, sums, float32((counted, grads))), None

    parts = jax.tree.map(functools.partial(_split_rows, parts=microbatches), batch)
    first = jax.tree.map(lambda x: x[0], parts)
    _, counted = jax.eval_shape(mean_loss, params, first)
    # Sums of bfloat16 gradients would lose what a late microbatch adds.
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (counted, params))
    ((losses, figures), grads), _ = jax.lax.scan(add, zero, parts)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return mean * losses.sum(), losses, figures, grads


def _split_rows(x: jax.Array, parts: int) -> jax.Array:
    """Cuts the rows of an array (B, …) into parts: (parts, B / parts, …)."""
    # Every part takes rows of every device: no row has to move.
    rows = x.reshape(-1, parts, *x.shape[1:])
    return jnp.swapaxes(rows, 0, 1)
