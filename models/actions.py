"""Kinds of actions: what a model predicts of them, and how far off it is.

Letters: A action size, K bins, P what is predicted of a step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

KINDS = ("continuous", "binned", "discrete")
BINS = 21


@dataclass(frozen=True)
class Actions:
    """Actions of a kind.

    kind: "continuous", in [-1, 1], of which the mean is predicted; "binned", the same
      in `bins` values of each number, of which logits are predicted: any distribution,
      such as one with a mode on either side and none between; or "discrete", one-hot,
      of which logits are predicted.

    Raises:
      ValueError: the kind is unknown, or there are too few bins.
    """

    kind: str
    size: int
    bins: int

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(
                f"action_kind={self.kind!r} must be one of {', '.join(KINDS)}"
            )
        if self.bins < 2:
            raise ValueError(f"action_bins={self.bins} must be at least 2")

    @property
    def predicted_size(self) -> int:
        """Returns how many numbers are predicted of a step, P."""
        return self.size * (self.bins if self.kind == "binned" else 1)

    def bounded(self, values: jax.Array) -> jax.Array:
        """Returns continuous actions in [-1, 1] of any values; logits as they are."""
        return jnp.tanh(values) if self.kind == "continuous" else values

    def errors(self, predicted: jax.Array, targets: jax.Array) -> jax.Array:
        """Returns errors of predictions (..., P), of targets (..., A), (...,).

        Of continuous actions the mean square over A, of others the cross-entropy, of
        binned ones summed over A.
        """
        if self.kind == "continuous":
            return jnp.square(predicted - targets).mean(axis=-1)
        if self.kind == "binned":
            last = self.bins - 1
            nearest = jnp.round((targets + 1) / 2 * last).astype(jnp.int32)  # (..., A)
            targets = jax.nn.one_hot(jnp.clip(nearest, 0, last), self.bins)
            predicted = predicted.reshape(targets.shape)  # (..., A, K)
        errors = -(targets * jax.nn.log_softmax(predicted)).sum(axis=-1)
        return errors.sum(axis=-1) if self.kind == "binned" else errors
