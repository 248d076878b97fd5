"""Everything of a run that does not depend on its task: mesh, attention, optimizer.

Besides `train.py`, the tools and the other modules of `tasks`, no module reads a
config. Whatever is made here has been checked before anything is compiled.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_collections
from jax.sharding import NamedSharding

from data.batch import Block
from data.rows import TextBatches
from kernels import layouts, masks
from kernels.compiler import compiler_options
from kernels.layouts import Layout
from kernels.masks import Mask, Visible
from kernels.ring_attention import make_ring_attention
from models.abstract import Model
from models.memory import Execution
from models.sizes import LanguageModelConfig
from tasks import corpora
from tasks.config_errors import names_fields
from tasks.mask import document_mask
from training import chips
from training import optimizer as optimizers
from training.guard import GuardSettings
from training.layerwise import STACKED
from training.mesh import Axes, MeshShape, Partition, make_mesh
from training.metrics import StepWork
from training.overlap import parameter_options
from training.step import (
    Counts,
    LossFunction,
    TrainState,
    count_tokens,
    initial_state,
    make_train_step,
)
from training.update import Optimizer

PARTS = {field.name for field in dataclasses.fields(LanguageModelConfig)}
PARTS = PARTS - {"rope_theta", "norm_epsilon"} | {"truncate", "action_bins"}
"""Fields that a fingerprint leaves out where they have their default."""


STORED = "moments", "parameters", "placement"
"""Fields of config.optimizer that are of `Storage`."""


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


@dataclass(frozen=True)
class Task:
    """A model and its losses on a mesh, before any data is read.

    execution: settings of the model's speed and memory.
    batch_like: shape, type and sharding of a batch's arrays.
    objective: the training loss. held_out: the validation loss; the same or its parts.
    work: (tokens, visible pairs) of a step -> `StepWork`.
    open_data: reads the data that the config names; raises FileNotFoundError or
      ValueError where it is missing or does not fit the config.
    """

    model: Model
    execution: Execution
    batch_like: Any
    objective: Objective
    held_out: Objective
    work: Callable[[float, float], StepWork]
    open_data: Callable[[], Data]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a batch."""
        return self.batch_like.loss_weights.shape

    @property
    def sharding(self) -> NamedSharding:
        """Sharding of a batch's rows and columns; further axes are not sharded."""
        return self.batch_like.loss_weights.sharding

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model, those that are not trained included."""
        frozen = jax.tree.leaves(self.model.frozen_shapes)
        return self.num_trained + sum(leaf.size for leaf in frozen)

    @property
    def num_trained(self) -> int:
        """Number of those that are trained."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.model.shapes))


@dataclass(frozen=True)
class AttentionSystem:
    """One of the systems that the papers compare.

    layout: how the sequence is distributed over the ring.
    sharded: whether there may be a ring of more than one device.
    implementation: the kernel it requires; None for the config's.
    chunked: whether the feed-forward is computed in chunks.
    """

    layout: Layout
    sharded: bool
    implementation: str | None
    chunked: bool


@names_fields
def attention_system(config: ml_collections.ConfigDict) -> AttentionSystem:
    """Returns the system that `config.attention` names.

    Raises:
      ValueError: the system is unknown.
    """
    whole, striped = layouts.Contiguous(), layouts.Striped(config.stripe_granule)
    systems = {
        "vanilla": AttentionSystem(whole, False, "reference", chunked=False),
        "memory_efficient": AttentionSystem(whole, False, None, chunked=False),
        "blockwise": AttentionSystem(whole, False, None, chunked=True),
        "ring": AttentionSystem(whole, True, None, chunked=True),
        "striped": AttentionSystem(striped, True, None, chunked=True),
        "zigzag": AttentionSystem(layouts.Zigzag(), True, None, chunked=True),
    }
    if config.attention not in systems:
        raise ValueError(f"{config.attention=} must be one of {', '.join(systems)}")
    return systems[config.attention]


def simulate_devices(config: ml_collections.ConfigDict) -> None:
    """Makes this process simulate CPU devices if the config asks for them.

    Raises:
      RuntimeError: JAX has devices already.
    """
    if config.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.simulated_devices)


@names_fields
def mesh_shape(config: ml_collections.ConfigDict, devices: int) -> MeshShape:
    """Returns the axes of a mesh of this many devices.

    Raises:
      ValueError: the axes do not match the devices, or there is a ring that the
        attention system cannot use; the message lists every field to change.
    """
    shape = MeshShape(**config.mesh).fill(devices)
    sharding = shape.ring * shape.ulysses
    if sharding > 1 and not attention_system(config).sharded:
        fsdp = shape.fsdp * sharding  # their devices shard the batch instead
        parts = config.train.microbatches * shape.data * fsdp
        rows = -(-config.data.batch_rows // max(parts, 1)) * parts
        change = {"mesh.ulysses": 1} if shape.ulysses > 1 else {}
        change |= {"mesh.ring": 1, "mesh.fsdp": fsdp}
        change |= {"data.batch_rows": rows} if rows != config.data.batch_rows else {}
        ulysses = f" and ulysses of {shape.ulysses}" if shape.ulysses > 1 else ""
        raise ValueError(
            f"{config.attention=} does not shard the sequence, but the mesh has a ring "
            f"of {shape.ring}{ulysses}: set "
            + ", ".join(f"config.{name}={value}" for name, value in change.items())
            + ", or config.attention=striped"
        )
    return shape.cut_ring(config.model.hidden_size)


def partition(
    config: ml_collections.ConfigDict, devices: Sequence[jax.Device]
) -> Partition:
    """Returns the partition over the devices to run on or compile for.

    Raises:
      ValueError: as `mesh_shape`.
    """
    return Partition(make_mesh(mesh_shape(config, len(devices)), devices))


def scores(config: ml_collections.ConfigDict) -> dict[str, float | None]:
    """Returns the attention's arguments of what becomes of q · k."""
    model = config.model
    return {
        "scale": model.attention_scale or None,
        "soft_cap": model.attention_soft_cap or None,
    }


@names_fields
def ring_attention(
    config: ml_collections.ConfigDict, partition: Partition
) -> Callable[..., jax.Array]:
    """Builds the config's attention on the mesh.

    Returns:
      attend(q, k, v, visible, *, window=None, sinks=None), else as that of
      `make_ring_attention`. visible: a mask; or the bounds of rows of the run's data,
      which show nothing but what `config.mask` does. window: the tokens that a query
      sees of those, its own included.

    Raises:
      ValueError: an unknown implementation, or mask.
    """
    system, of_run = attention_system(config), document_mask(config).within()
    attend = make_ring_attention(
        partition.mesh,
        layout=system.layout,
        ring_axes=partition.axes("ring"),
        **scores(config),
        implementation=system.implementation or config.implementation or None,
        keep_tail=config.remat == "tail",
        ulysses_axis="ulysses" if "ulysses" in partition.mesh.shape else None,
        count_steps=counts_steps(config, partition),
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


def counts_steps(
    config: ml_collections.ConfigDict, partition: Partition, longest: int | None = None
) -> bool:
    """Returns whether rings end where a batch's documents do, as they count them.

    longest: tokens of a document; None for those of the config's corpora.
    """
    layout = attention_system(config).layout
    return corpora.reads_few_shards(config, layout, partition.ring_size, longest)


def abstract_state(
    model: Model, optimizer: Optimizer, partition: Partition
) -> TrainState:
    """Returns shape, dtype and sharding of every leaf of the train state."""

    shapes = jax.eval_shape(lambda p: initial_state(p, optimizer), model.shapes)

    def placed(
        shape: jax.ShapeDtypeStruct, names: Axes = (), on_host: bool = False
    ) -> Any:
        names = names or (None,) * shape.ndim
        sharding = partition.sharding(names, shape.shape)
        if on_host and shape.ndim > 1:
            sharding = partition.on_host(sharding)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    def param_placed(path: tuple, shape: Any, names: Axes) -> Any:
        is_far = optimizer.layers_on_host and path[0].key == STACKED
        return placed(shape, names, is_far)

    state_placed = functools.partial(placed, on_host=optimizer.on_host)
    axes = optimizer.axes(shapes.optimizer_state, model.axes)
    return TrainState(
        step=placed(shapes.step),
        params=jax.tree_util.tree_map_with_path(
            param_placed, shapes.params, model.axes
        ),
        optimizer_state=jax.tree.map(state_placed, shapes.optimizer_state, axes),
        guard=jax.tree.map(placed, shapes.guard),
    )


@names_fields
def optimizer_settings(
    config: ml_collections.ConfigDict,
) -> optimizers.OptimizerSettings:
    """Returns the settings of the optimizer and its schedule."""
    fields = {**config.optimizer}
    stored = {name: fields.pop(name) for name in STORED}
    storage = optimizers.Storage(**stored, seed=config.seed)
    return optimizers.OptimizerSettings(
        total_steps=config.train.steps, storage=storage, **fields
    )


def make_optimizer(
    config: ml_collections.ConfigDict, model: Model
) -> tuple[Optimizer, Callable[[int], jax.Array]]:
    """Builds the config's optimizer, and its learning rate by updates made."""
    settings = optimizer_settings(config)
    return optimizers.make_optimizer(settings, model.shapes, model.axes)


@names_fields
def guard_settings(config: ml_collections.ConfigDict) -> GuardSettings:
    """Returns which updates are skipped, and when a run ends."""
    return GuardSettings(**config.guard)


def identity(sizes: Any, always: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields of a model's sizes in which a checkpoint must agree.

    Without those of PARTS that have their default, as in checkpoints from before there
    were such parts; but with those of `always`.
    """
    found = {}
    for field in dataclasses.fields(sizes):
        value = getattr(sizes, field.name)
        is_optional = field.name in PARTS and field.name not in always
        if not (is_optional and value == field.default):
            is_nested = dataclasses.is_dataclass(value)
            found[field.name] = identity(value) if is_nested else value
    return found


def train_step(
    config: ml_collections.ConfigDict,
    loss_sum: LossFunction,
    optimizer: Optimizer,
    state: TrainState,
    count: Callable[[Any], Counts] = count_tokens,
) -> jax.stages.Wrapped:
    """Builds the program of `make_train_step`; it donates the state.

    state: shape, dtype and sharding of every leaf (see `abstract_state`).
    """
    sharding = jax.tree.map(lambda leaf: leaf.sharding, state)
    kind = sharding.step.mesh.devices.flat[0].device_kind
    options = compiler_options(kind)
    if config.overlap_parameters:
        options |= parameter_options(chips.find(kind))
    return jax.jit(
        make_train_step(
            loss_sum,
            optimizer,
            microbatches=config.train.microbatches,
            count=count,
            spike_sigmas=config.guard.spike_sigmas,
        ),
        out_shardings=(sharding, sharding.step),
        donate_argnums=0,
        compiler_options=options,
    )
