"""A small model on a ring of any size, with a window, and its losses by token."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from data.batch import Batch
from kernels.layouts import order, padded_length, unpermute
from tasks.programs import compile_programs
from tasks.state import sharding_of
from tasks.text import TextRun
from tests.cases import table
from tests.small.models import Run
from tests.support.hard_rows import ROWS, TOKENS, VOCAB
from training.loop import Programs
from training.sharding.mesh import MeshShape
from training.step import initial_state
from training.update.at_once import AtOnce

SIZES = {"model__vocab_size": VOCAB, "data__batch_rows": len(ROWS)}
SIZES |= dict(table("runs.txt", "ring_model"))

RATE = 1024.0
"""Of plain descent: a step moves parameters so far that it shows their gradients."""
DESCENT = AtOnce(optax.sgd(RATE))


class Descending(TextRun):
    """A run that is trained by plain descent."""

    optimizer = DESCENT


class RingModel(Run):
    """The model's task, its parameters, and what it gives for `HardRows`."""

    def __init__(self, shape: MeshShape, attention: str, **overrides: Any):
        # Without sinks rows that see nothing have nothing to divide by.
        sinks = {"model__attention_sinks": attention != "striped"}
        super().__init__(shape, attention, **SIZES | sinks | overrides)
        self.layout, self.ring = self.order()
        self.length = padded_length(self.layout, self.ring, TOKENS)
        self.config.data.context_tokens = self.length
        self.task = self.resolved = Descending(self.config, self.partition)
        self.model = self.task.model
        self.sizes = self.model.config

    @property
    def windows(self) -> list[int]:
        """Of the layers, 0 for none."""
        return [kind.window for kind in self.sizes.layer_kinds]

    def slots(self) -> np.ndarray:
        """Slot of each token of a row: (T,)."""
        return np.argsort(order(self.layout, self.ring, self.length))

    def placed(self, batch: Batch, parameters: Any = None) -> tuple[Any, Batch]:
        """Puts parameters, the model's own unless others are given, and a batch.

        On the mesh; the batch is in layout order.
        """
        sharding = self.partition.sharding(("batch", "sequence"), batch.tokens.shape)
        placing = jax.tree.map(lambda x: x.sharding, self.parameters), sharding
        return jax.device_put((parameters or self.parameters, batch), placing)

    @functools.cached_property
    def losses_program(self) -> Any:
        """From weights, parameters and a batch to the loss of every token."""

        def loss_sum(weights: jax.Array, parameters: Any, batch: Batch) -> jax.Array:
            batch = batch._replace(loss_weights=weights)
            return self.task.objective.loss_sum(parameters, batch)

        return jax.jit(jax.grad(loss_sum))

    def token_losses(self, batch: Batch, parameters: Any = None) -> np.ndarray:
        """Returns the losses of a batch in layout order, in natural order: (B, T)."""
        given = self.placed(batch, parameters)
        losses = self.losses_program(given[1].loss_weights, *given)
        return unpermute(np.asarray(losses), self.layout, self.ring)

    @functools.cached_property
    def programs(self) -> Programs:
        """Those of a run."""
        return compile_programs(self.task, {})

    def step(self, batch: Batch, parameters: Any = None) -> tuple[Any, dict]:
        """Returns gradients and metrics of a step with a batch in layout order."""
        parameters, batch = self.placed(batch, parameters)
        before = jax.device_get(parameters)
        state = initial_state(jax.tree.map(jnp.array, before), DESCENT)
        state = jax.device_put(state, sharding_of(self.task.state_like))
        after, metrics = self.programs.train_step(state, batch)
        after, metrics = jax.device_get((after.params, metrics))
        return jax.tree.map(lambda a, b: (a - b) / RATE, before, after), metrics

    def evaluation(self, batch: Batch, parameters: Any = None) -> float:
        """Returns the mean loss of a batch in layout order, as a validation does."""
        losses, weights = self.programs.evaluate(*self.placed(batch, parameters))
        return float(losses.sum() / weights.sum())
