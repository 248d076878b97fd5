"""Behaviour cloning: from an observation alone to the action, by a perceptron."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.actions import BINS, KINDS, Actions
from models.layers import matrix
from models.memory import Partition

STEP = ("batch", "sequence", None)


@dataclass(frozen=True)
class ClonerConfig:
    """Sizes of a model.

    chain_length: episodes in a row of the batch. action_kind, action_bins: see
      `Actions`.
    """

    hidden_size: int
    num_layers: int
    observation_size: int
    action_size: int
    chain_length: int
    action_kind: str = KINDS[0]
    action_bins: int = BINS

    def __post_init__(self):
        _ = self.actions  # are checked
        # The deeper layers are one parameter, which a checkpoint needs elements of.
        if self.num_layers < 2 or self.hidden_size < 1:
            raise ValueError(
                f"num_layers={self.num_layers}, hidden_size={self.hidden_size} of a "
                "perceptron: at least 2, and 1"
            )

    @property
    def actions(self) -> Actions:
        """The kind of actions."""
        return Actions(self.action_kind, self.action_size, self.action_bins)


class Cloner(nnx.Module):
    """A perceptron of `num_layers` hidden layers; every device has all of it."""

    def __init__(self, config: ClonerConfig, partition: Partition, *, rngs: nnx.Rngs):
        self.partition, self.predicted = partition, config.actions
        wide = config.hidden_size

        def weights(*shape: int) -> nnx.Param:
            stddev = (2 / shape[-2]) ** 0.5  # He et al., 1502.01852
            return matrix(rngs, shape, (None,) * len(shape), stddev)

        def bias(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, jnp.float32), axes=(None,) * len(shape))

        self.input, self.input_bias = weights(config.observation_size, wide), bias(wide)
        deeper = config.num_layers - 1
        self.hidden, self.hidden_bias = weights(deeper, wide, wide), bias(deeper, wide)
        size = config.actions.predicted_size
        self.output, self.output_bias = weights(wide, size), bias(size)

    def __call__(self, observations: jax.Array) -> jax.Array:
        """Maps observations (B, S, their size) to what is predicted, (B, S, P)."""
        parameters = (
            *(self.input, self.input_bias),
            *(self.hidden, self.hidden_bias),
            *(self.output, self.output_bias),
        )

        def local(x: jax.Array, *parameters: jax.Array) -> jax.Array:
            first, first_bias, hidden, hidden_bias, last, last_bias = parameters
            x = jax.nn.relu(x @ first + first_bias)
            for weights, bias in zip(hidden, hidden_bias, strict=True):
                x = jax.nn.relu(x @ weights + bias)
            return self.predicted.bounded(x @ last + last_bias)

        names = STEP, *(parameter.axes for parameter in parameters)
        call = self.partition.over_shards(local, names, STEP)
        return call(observations, *(parameter[...] for parameter in parameters))
