"""A config resolved once on a mesh: what its run, its plans and its tools are made of.

`tasks/task.py` makes the `Run` of a config and of devices; it is passed down whole or
in parts. What needs no devices stands in `tasks/systems.py`; besides `train.py`, the
tools and `tasks`, no module reads a config.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from data.document_mask import DocumentMask
from kernels.cost.choice import Choice, default_granule, known_chip
from kernels.cost.work import Row
from kernels.delta.attention import checked_runs, make_delta_attention
from kernels.devices import chips
from kernels.devices.compiler import compiler_options
from kernels.layouts import Layout, padded_length
from kernels.ring_attention import make_ring_attention
from models.abstract import Model
from models.memory import Execution, Kept
from models.sizes import DecoderConfig
from tasks.config_errors import names_fields
from tasks.parts import Data, ModelParts, Objective, Scores
from tasks.state import abstract_state, optimizer_settings, sharding_of, state_shapes
from tasks.systems import (
    AttentionSystem,
    attention_system,
    check_execution,
    chosen_execution,
    count_kept,
    device_of,
    document_mask,
    limited,
    partition,
)
from training.reports.metrics import StepWork
from training.sharding.mesh import Partition
from training.sharding.overlap import parameter_options
from training.step import TrainState, make_train_step
from training.update.at_once import Optimizer
from training.update.optimizer import Schedule, make_optimizer


@dataclass(frozen=True, eq=False)
class Run[Sizes: DecoderConfig](abc.ABC):
    """A config on a mesh, and what it makes; each thing is made when first asked for.

    Whatever is wrong with the config raises ValueError, with its fields named as in the
    config. A task adds what is abstract here (see `tasks/text.py`).

    given_rows: what its rows are alike; () for rows drawn from the config's corpora.
    fixed: the layout, where it is chosen already.
    shared: the model of another mesh, where this run is counted only.
    """

    config: ConfigDict
    partition: Partition
    given_rows: tuple[Row, ...] = ()
    fixed: Choice | None = None
    shared: ModelParts[Sizes] | None = None

    @classmethod
    def of(cls, config: ConfigDict, devices: Sequence[jax.Device]) -> Self:
        """Returns the run on these devices; ValueError as `systems.mesh_shape`."""
        return cls(config, partition(config, devices))

    def on(self, partition: Partition) -> Self:
        """Returns the run on another mesh."""
        return dataclasses.replace(self, partition=partition, shared=None)

    def counted_on(self, partition: Partition, fixed: Choice | None = None) -> Self:
        """Returns the run on another mesh, to count what it holds there.

        With this mesh's model, which is not traced again: it is not to be run.
        fixed: the layout, where it is chosen already.
        """
        shared = ModelParts(
            sizes=self.sizes,
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
            state_shapes=self._state_shapes,
        )
        return dataclasses.replace(
            self, partition=partition, fixed=fixed, shared=shared
        )

    # What a task adds.

    @abc.abstractmethod
    def read_sizes(self) -> Sizes:
        """Returns the sizes of the model, and its parts."""

    @abc.abstractmethod
    def build_model(self) -> Model:
        """Returns the model of `sizes`, without parameters.

        Raises:
          ValueError: sizes that make no model, or that do not divide over the mesh.
        """

    @property
    @abc.abstractmethod
    def rows(self) -> tuple[Row, ...]:
        """Rows alike those of the run: what their tokens see."""

    @property
    @abc.abstractmethod
    def choice(self) -> Choice:
        """The layout that the config names or, of some, the fastest; and its ring."""

    @property
    @abc.abstractmethod
    def batch_like(self) -> Any:
        """Shape, dtype and sharding of a batch's arrays."""

    @property
    @abc.abstractmethod
    def objective(self) -> Objective:
        """The training loss."""

    @property
    @abc.abstractmethod
    def held_out(self) -> Objective:
        """The validation loss: the same, or its parts."""

    @abc.abstractmethod
    def work(self, tokens: float, pairs: float) -> StepWork:
        """Returns a step's work, from its tokens and visible pairs."""

    @abc.abstractmethod
    def open_data(self) -> Data:
        """Reads the data that the config names.

        Raises:
          FileNotFoundError, ValueError: they are missing, or do not fit the config.
        """

    # Rows, and how they lie on the mesh.

    @functools.cached_property
    def system(self) -> AttentionSystem:
        tokens = self.config.data.context_tokens
        ring_size = self.partition.ring_size
        granule = default_granule(ring_size, tokens, self.device_kind)
        return attention_system(self.config, granule)

    def choosing(self, choice: Choice) -> Self:
        """Returns the run with another layout, or ring."""
        return dataclasses.replace(self, given_rows=self.rows, fixed=choice)

    @functools.cached_property
    def chip(self) -> chips.Chip:
        """That of the mesh's devices (see `known_chip`)."""
        return known_chip(self.device_kind)

    @property
    def device_kind(self) -> str:
        """That of the mesh's devices, as JAX calls it; "" if it is not known."""
        device = self.partition.mesh.abstract_mesh.abstract_device
        return device.device_kind if device else ""

    @property
    def layout(self) -> Layout:
        """Layout of a row's tokens over the ring."""
        return self.choice.layout

    @functools.cached_property
    def mask(self) -> DocumentMask:
        return document_mask(self.config)

    @functools.cached_property
    def token_shape(self) -> tuple[int, int]:
        """Rows of the global batch, and slots of each.

        A row has `config.data.context_tokens`, and padding up to what the layout can
        shard.
        """
        data = self.config.data
        ring_size = self.partition.ring_size
        slices = self.partition.slices
        slots = padded_length(self.layout, ring_size, data.context_tokens, slices)
        return data.batch_rows, slots

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a batch's arrays."""
        return self.token_shape

    @functools.cached_property
    @names_fields
    def sharding(self) -> NamedSharding:
        """Sharding of a batch's first two axes alone; ValueError as `check_batch`."""
        self.check_batch()
        return self.partition.sharding(("batch", "sequence"), self.shape)

    def check_batch(self) -> None:
        """Raises ValueError if the rows of a microbatch do not divide over the mesh.

        Or if shards are too short for the layers' convolution.
        """
        config = self.config
        rows = config.data.batch_rows
        wrong = []
        parts = config.train.microbatches * self.partition.shards("batch")
        if config.train.microbatches < 1:
            wrong.append(f"{config.train.microbatches=} must be at least 1")
        elif rows < 1 or rows % parts:
            wrong.append(
                f"{config.data.batch_rows=} does not divide into "
                f"{config.train.microbatches=} over the mesh's data and fsdp axes: "
                f"make it a multiple of {parts}, the next is "
                f"{max(1, -(-rows // parts)) * parts}"
            )
        if not 0 <= config.train.experts_balance < math.inf:
            wrong.append(f"{config.train.experts_balance=} must be at least 0")
        if reach := max(config.model.delta_convolution - 1, 0):
            partition = self.partition
            ring_size = partition.ring_size
            slots = self.token_shape[1]
            try:
                checked_runs(self.layout, ring_size, slots, partition.slices, reach)
            except ValueError as error:
                wrong.append(str(error))
        if wrong:
            raise ValueError("; ".join(wrong))

    @functools.cached_property
    def local_tokens(self) -> int:
        """Tokens of a microbatch on a device."""
        rows, columns = self.token_shape
        shards = self.partition.shards("batch") * self.partition.shards("sequence")
        return rows * columns // (shards * self.config.train.microbatches)

    # Attention, and how layers run.

    @functools.cached_property
    def kept(self) -> Kept:
        """Counts the activations that the layers of a device keep."""
        execution = check_execution(self.config)
        return count_kept(self.sizes, self.partition, self.local_tokens, execution)

    @functools.cached_property
    @names_fields
    def execution(self) -> Execution:
        """Settings of the model's speed and memory."""
        vocab_size = getattr(self.sizes, "vocab_size", 0)
        device = device_of(self.device_kind)
        return chosen_execution(self.config, self.kept, device, vocab_size)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.compute_dtype)

    @property
    def scores(self) -> Scores:
        """The attention's arguments of what becomes of q · k."""
        model = self.config.model
        return Scores(
            scale=model.attention_scale or None,
            soft_cap=model.attention_soft_cap or None,
        )

    @functools.cached_property
    @names_fields
    def attention(self) -> Callable[..., jax.Array]:
        """The attention on the mesh, attend(q, k, v, visible, *, window, sinks).

        visible: a mask; or the bounds of rows of the run's data, which show nothing but
        what `config.mask` does. window: the tokens that a query sees of those, its own
        included. All else as of `make_ring_attention`.

        Raises:
          ValueError: an unknown implementation, or mask.
        """
        partition = self.partition
        attend = make_ring_attention(
            partition.mesh,
            layout=self.layout,
            ring_axes=partition.axes("ring"),
            **self.scores,
            implementation=self.implementation,
            ulysses_axis="ulysses" if "ulysses" in partition.mesh.shape else None,
            one_way=self.choice.one_way,
            count_steps=self.choice.count_steps,
        )

        return limited(attend, self.mask.within())

    @functools.cached_property
    @names_fields
    def mix(self) -> Callable[..., Any]:
        """The mixing of Gated DeltaNet on the mesh (see `make_delta_attention`)."""
        partition = self.partition
        return make_delta_attention(
            partition.mesh,
            layout=self.layout,
            ring_axes=partition.axes("ring"),
            ulysses_axis="ulysses" if "ulysses" in partition.mesh.shape else None,
            segment=self.config.delta_segment_tokens,
            implementation=self.implementation,
        )

    @property
    def implementation(self) -> str | None:
        """The kernel that the system or the config names; None where neither does."""
        return self.system.implementation or self.config.implementation or None

    # The model, and the training step.

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Sizes of the model, and its parts."""
        return self.shared.sizes if self.shared else self.read_sizes()

    @functools.cached_property
    @names_fields
    def model(self) -> Model:
        """The model, without parameters; ValueError as `build_model`."""
        return self.shared.model if self.shared else self.build_model()

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, those that are not trained included."""
        frozen = jax.tree.leaves(self.model.frozen_shapes)
        return self.num_trained + sum(leaf.size for leaf in frozen)

    @property
    def num_trained(self) -> int:
        """Number of those that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.model.shapes))

    @functools.cached_property
    def _updates(self) -> tuple[Optimizer, Schedule]:
        if self.shared:
            return self.shared.optimizer, self.shared.schedule
        settings = optimizer_settings(self.config)
        return make_optimizer(settings, self.model.shapes, self.model.axes)

    @property
    def optimizer(self) -> Optimizer:
        return self._updates[0]

    @property
    def schedule(self) -> Schedule:
        """The learning rate by updates made."""
        return self._updates[1]

    @functools.cached_property
    def _state_shapes(self) -> TrainState:
        if self.shared:
            return self.shared.state_shapes
        return state_shapes(self.model, self.optimizer)

    @functools.cached_property
    def state_like(self) -> TrainState:
        """Shape, dtype and sharding of every leaf of the train state."""
        return abstract_state(
            self._state_shapes, self.model.axes, self.optimizer, self.partition
        )

    @functools.cached_property
    def compiler_options(self) -> dict[str, str]:
        """XLA's options of the programs that attend."""
        return compiler_options(self.partition.mesh, self.config.gpu_transfers)

    def train_step(self) -> jax.stages.Wrapped:
        """Builds the program of `make_train_step`; it donates the state."""
        config = self.config
        sharding = sharding_of(self.state_like)
        options = self.compiler_options
        if config.overlap_parameters:
            kind = self.partition.mesh.devices.flat[0].device_kind
            options = options | parameter_options(chips.find(kind))
        step = make_train_step(
            self.objective.loss_sum,
            self.optimizer,
            microbatches=config.train.microbatches,
            count=self.objective.count,
            spike_sigmas=config.guard.spike_sigmas,
        )
        return jax.jit(
            step,
            out_shardings=(sharding, sharding.step),
            donate_argnums=0,
            compiler_options=options,
        )
