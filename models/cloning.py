"""Behaviour cloning: from an observation alone to the action, by a perceptron."""

from dataclasses import dataclass, fields

import jax
import jax.numpy as jnp
from flax import nnx

from models.agentic import ACTION_KINDS, bounded, check_action_kind
from models.execution import Partition
from models.layers import matrix

STEP = ("batch", "sequence", None)


@dataclass(frozen=True)
class ClonerConfig:
    """Sizes of a model.

    chain_length: episodes in a row of the batch. action_kind: as an agent's.
    """

    hidden_size: int
    num_layers: int
    observation_size: int
    action_size: int
    chain_length: int
    action_kind: str = ACTION_KINDS[0]

    def __post_init__(self):
        check_action_kind(self.action_kind)
        sizes = {
            size.name: getattr(self, size.name)
            for size in fields(self)
            if size.type is int
        }
        wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1]
        if wrong:
            raise ValueError(f"model sizes must be at least 1: {', '.join(wrong)}")
        if self.num_layers < 2:
            # The deeper ones are one parameter, which a checkpoint needs elements of.
            raise ValueError(
                f"num_layers={self.num_layers} of a perceptron: at least 2"
            )


class Cloner(nnx.Module):
    """A perceptron of `num_layers` hidden layers; every device has all of it."""

    def __init__(self, config: ClonerConfig, partition: Partition, *, rngs: nnx.Rngs):
        self.partition, self.action_kind = partition, config.action_kind
        wide = config.hidden_size

        def weights(*shape: int) -> nnx.Param:
            stddev = (2 / shape[-2]) ** 0.5  # He et al., 1502.01852
            return matrix(rngs, shape, (None,) * len(shape), stddev)

        def bias(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, jnp.float32), axes=(None,) * len(shape))

        self.input, self.input_bias = weights(config.observation_size, wide), bias(wide)
        deeper = config.num_layers - 1
        self.hidden, self.hidden_bias = weights(deeper, wide, wide), bias(deeper, wide)
        size = config.action_size
        self.output, self.output_bias = weights(wide, size), bias(size)

    def __call__(self, observations: jax.Array) -> jax.Array:
        """Maps observations (B, S, their size) to what is predicted, (B, S, A)."""
        kind = self.action_kind
        parameters = (
            self.input,
            self.input_bias,
            self.hidden,
            self.hidden_bias,
            self.output,
            self.output_bias,
        )

        def local(x: jax.Array, *parameters: jax.Array) -> jax.Array:
            first, first_bias, hidden, hidden_bias, last, last_bias = parameters
            x = jax.nn.relu(x @ first + first_bias)
            for number in range(len(hidden)):
                x = jax.nn.relu(x @ hidden[number] + hidden_bias[number])
            return bounded(x @ last + last_bias, kind)

        names = STEP, *(parameter.axes for parameter in parameters)
        call = self.partition.over_shards(local, names, STEP)
        return call(observations, *(parameter[...] for parameter in parameters))
