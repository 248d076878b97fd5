"""A config resolved once on a mesh: what its run, its plans and its tools are made of.

`tasks/task.py` makes the `Run` of a config and of devices; it is passed down whole or
in parts. What needs no devices stands in `tasks/systems.py`; besides `train.py`, the
tools and `tasks`, no module reads a config.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from ml_collections import ConfigDict

from data.batch import Block
from data.document_mask import DocumentMask
from data.rows import TextBatches
from kernels import chips, masks
from kernels.compiler import compiler_options
from kernels.cost.choice import Choice, default_granule, known_chip
from kernels.cost.work import Row
from kernels.delta_attention import checked_runs, make_delta_attention
from kernels.layouts import Layout, padded_length
from kernels.masks import Mask, Visible
from kernels.ring_attention import make_ring_attention
from models.memory import Execution, Kept
from tasks import layout_choice
from tasks.config_errors import names_fields
from tasks.state import (
    abstract_state,
    optimizer_settings,
    sharding_of,
    state_shapes,
)
from tasks.systems import (
    AttentionSystem,
    attention_system,
    check_execution,
    chosen_execution,
    device_of,
    document_mask,
    partition,
)
from training.mesh import Partition
from training.optimizer import make_optimizer
from training.overlap import parameter_options
from training.step import Counts, LossFunction, TrainState, make_train_step
from training.update import Optimizer


@dataclass(frozen=True)
class Objective:
    """A loss to minimise.

    loss_sum: see `LossFunction`.
    count: batch -> `Counts`.
    part_names: names of the parts of the loss, if it has any.
    """

    loss_sum: LossFunction
    count: Callable[[Any], Counts]
    part_names: Sequence[str] = ()


@dataclass(frozen=True)
class Data:
    """The data of a run.

    batches: this host's blocks of the batch of any step.
    validation: this host's blocks of the held-out batches.
    fingerprint: properties of model and data in which a checkpoint must agree.
    """

    batches: TextBatches
    validation: Sequence[dict[Block, Any]]
    fingerprint: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """A config on a mesh, and what it makes; each thing is made when first asked for.

    Whatever is wrong with the config raises ValueError, with its fields named as in the
    config. A task adds these (see `tasks/text.py`):

    sizes: of the model, and its parts. model: a `Model`, without parameters.
    batch_like: shape, type and sharding of a batch's arrays.
    objective: the training loss, an `Objective`. held_out: the validation loss: the
      same, or its parts.
    work(tokens, pairs): `StepWork`, from a step's tokens and visible pairs.
    open_data(): reads the `Data` that the config names; raises FileNotFoundError or
      ValueError where they are missing, or do not fit the config.

    given_rows: what its rows are alike; () for rows drawn from the config's corpora.
    fixed: the layout, where it is chosen already.
    """

    config: ConfigDict
    partition: Partition
    given_rows: tuple[Row, ...] = ()
    fixed: Choice | None = None

    @classmethod
    def of(cls, config: ConfigDict, devices: Sequence[jax.Device]) -> Self:
        """Returns the run on these devices.

        Raises:
          ValueError: as `systems.mesh_shape`.
        """
        return cls(config, partition(config, devices))

    def on(self, partition: Partition) -> Self:
        """Returns the run on another mesh."""
        return dataclasses.replace(self, partition=partition)

    def counted_on(self, partition: Partition, fixed: Choice | None = None) -> Self:
        """Returns the run on another mesh, to count what it holds there.

        With this mesh's model, which is not traced again: it is not to be run.
        fixed: the layout, where it is chosen already.
        """
        run = dataclasses.replace(self, partition=partition, fixed=fixed)
        for name in "sizes", "model", "_optimizer", "_state_shapes":
            vars(run)[name] = getattr(self, name)
        return run

    # Rows, and how they lie on the mesh.

    @functools.cached_property
    def system(self) -> AttentionSystem:
        row = self.partition.ring_size, self.config.data.context_tokens
        return attention_system(self.config, default_granule(*row, self._device_kind))

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows alike those of the run: what their tokens see."""
        return self.given_rows or layout_choice.typical_rows(self.config)

    @functools.cached_property
    def choice(self) -> Choice:
        """The layout that the config names or, of some, the fastest; and its ring."""
        return self.fixed or layout_choice.ranked_choices(self)[0]

    def choosing(self, choice: Choice) -> Self:
        """Returns the run with another layout, or ring."""
        return dataclasses.replace(self, given_rows=self.rows, fixed=choice)

    @functools.cached_property
    def chip(self) -> chips.Chip:
        """That of the mesh's devices (see `known_chip`)."""
        return known_chip(self._device_kind)

    @property
    def _device_kind(self) -> str:
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
        ring, slices = self.partition.ring_size, self.partition.slices
        slots = padded_length(self.layout, ring, data.context_tokens, slices)
        return data.batch_rows, slots

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a batch's arrays."""
        return self.token_shape

    @functools.cached_property
    @names_fields
    def sharding(self) -> NamedSharding:
        """Sharding of a batch's rows and columns; further axes are not sharded.

        Raises:
          ValueError: as `check_batch`.
        """
        self.check_batch()
        return self.partition.sharding(("batch", "sequence"), self.shape)

    def check_batch(self) -> None:
        """Raises ValueError if the rows of a microbatch do not divide over the mesh.

        Or if shards are too short for the layers' convolution.
        """
        config, rows, found = self.config, self.config.data.batch_rows, []
        parts = config.train.microbatches * self.partition.shards("batch")
        if config.train.microbatches < 1:
            found.append(f"{config.train.microbatches=} must be at least 1")
        elif rows < 1 or rows % parts:
            found.append(
                f"{config.data.batch_rows=} does not divide into "
                f"{config.train.microbatches=} over the mesh's data and fsdp axes: "
                f"make it a multiple of {parts}, the next is "
                f"{max(1, -(-rows // parts)) * parts}"
            )
        if reach := max(config.model.delta_convolution - 1, 0):
            partition, slots = self.partition, self.token_shape[1]
            runs = self.layout, partition.ring_size, slots, partition.slices
            try:
                checked_runs(*runs, reach)
            except ValueError as error:
                found.append(str(error))
        if found:
            raise ValueError("; ".join(found))

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
        said = check_execution(self.config)
        return Kept(
            sizes=self.config.model,
            tokens=self.local_tokens,
            tensor=self.partition.mesh.shape["tensor"],
            itemsize=said.compute_dtype.itemsize,
            feed_forward_chunk=said.feed_forward_chunk,
        )

    @functools.cached_property
    @names_fields
    def execution(self) -> Execution:
        """Settings of the model's speed and memory."""
        vocab_size = getattr(self.sizes, "vocab_size", 0)
        device = device_of(self.partition.mesh)
        return chosen_execution(self.config, self.kept, device, vocab_size)

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.config.compute_dtype)

    @property
    def scores(self) -> dict[str, float | None]:
        """The attention's arguments of what becomes of q · k."""
        model = self.config.model
        return {
            "scale": model.attention_scale or None,
            "soft_cap": model.attention_soft_cap or None,
        }

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
        partition, of_run = self.partition, self.mask.within()
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

        def attend_within(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            visible: Mask | Visible,
            window: int | None = None,
            sinks: jax.Array | None = None,
        ) -> jax.Array:
            within = of_run if isinstance(visible, Visible) else masks.full()
            if window is not None:
                within &= masks.window(window)
            return attend(q, k, v, visible, sinks=sinks, within=within)

        return attend_within

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
        )

    @property
    def implementation(self) -> str | None:
        """The kernel that the system or the config names; None where neither does."""
        return self.system.implementation or self.config.implementation or None

    # The model, and the training step.

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
    def _optimizer(self) -> tuple[Optimizer, Callable[[int], jax.Array]]:
        settings = optimizer_settings(self.config)
        return make_optimizer(settings, self.model.shapes, self.model.axes)

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer[0]

    @property
    def schedule(self) -> Callable[[int], jax.Array]:
        """The learning rate by updates made."""
        return self._optimizer[1]

    @functools.cached_property
    def _state_shapes(self) -> TrainState:
        return state_shapes(self.model, self.optimizer)

    @functools.cached_property
    def state_like(self) -> TrainState:
        """Shape, dtype and sharding of every leaf of the train state."""
        found = self._state_shapes, self.model.axes, self.optimizer
        return abstract_state(*found, self.partition)

    def train_step(self) -> jax.stages.Wrapped:
        """Builds the program of `make_train_step`; it donates the state."""
        config, sharding = self.config, sharding_of(self.state_like)
        kind = self.partition.mesh.devices.flat[0].device_kind
        options = compiler_options(kind)
        if config.overlap_parameters:
            options |= parameter_options(chips.find(kind))
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
