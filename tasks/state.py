"""The train state of a run: shapes, shardings, settings, identity in checkpoints."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from models.abstract import Model
from models.sizes import LanguageModelConfig
from tasks.config_errors import names_fields
from training.sharding.mesh import Axes, Partition
from training.step import TrainState, initial_state
from training.update.at_once import Optimizer
from training.update.guard import GuardSettings
from training.update.layerwise import STACKED
from training.update.optimizer import OptimizerSettings, Storage

PARTS = {field.name for field in dataclasses.fields(LanguageModelConfig)}
PARTS -= {"rope_theta", "norm_epsilon"}
PARTS |= {"truncate", "action_bins", "short_factor", "long_factor", "query_scale"}
PARTS |= {"gate_up_rank"}
"""Fields that a fingerprint leaves out where they have their default."""

STORED = "moments", "parameters", "placement"
"""Fields of config.optimizer that are of `Storage`."""


def sharding_of(tree: Any) -> Any:
    """Returns the shardings of a tree of arrays, or of their shapes."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def state_shapes(model: Model, optimizer: Optimizer) -> TrainState:
    """Returns shape and dtype of every leaf of the train state."""
    return jax.eval_shape(lambda p: initial_state(p, optimizer), model.shapes)


def abstract_state(
    shapes: TrainState, axes: Any, optimizer: Optimizer, partition: Partition
) -> TrainState:
    """Returns shape, dtype and sharding of every leaf of the train state.

    shapes: of `state_shapes`. axes: names of the parameters' axes.
    """

    sharded = functools.partial(_sharded, partition)

    def of_parameter(path: tuple, shape: Any, names: Axes) -> Any:
        is_far = optimizer.layers_on_host and path[0].key == STACKED
        return sharded(shape, names, is_far)

    of_state = functools.partial(sharded, on_host=optimizer.on_host)
    state_axes = optimizer.axes(shapes.optimizer_state, axes)
    return TrainState(
        step=sharded(shapes.step),
        params=jax.tree_util.tree_map_with_path(of_parameter, shapes.params, axes),
        optimizer_state=jax.tree.map(of_state, shapes.optimizer_state, state_axes),
        guard=jax.tree.map(sharded, shapes.guard),
    )


def abstract_frozen(model: Model, partition: Partition) -> Any:
    """Returns shape, dtype and sharding of the frozen parameters."""
    return abstract_parameters(model.frozen_shapes, model.frozen_axes, partition)


def abstract_parameters(shapes: Any, axes: Any, partition: Partition) -> Any:
    """Returns parameters' shapes and types with the sharding of their axes."""
    return jax.tree.map(functools.partial(_sharded, partition), shapes, axes)


def _sharded(
    partition: Partition,
    shape: jax.Array | jax.ShapeDtypeStruct,
    names: Axes = (),
    on_host: bool = False,
) -> Any:
    """Returns a shape with the sharding of its axes; matrices on the host, if asked."""
    sharding = partition.sharding(names or (None,) * shape.ndim, shape.shape)
    if on_host and shape.ndim > 1:
        sharding = partition.on_host(sharding)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


@names_fields
def optimizer_settings(config: ConfigDict) -> OptimizerSettings:
    """Returns the settings of the optimizer and its schedule."""
    fields = {**config.optimizer}
    stored = {name: fields.pop(name) for name in STORED}
    storage = Storage(**stored, seed=config.seed)
    return OptimizerSettings(total_steps=config.train.steps, storage=storage, **fields)


@names_fields
def guard_settings(config: ConfigDict) -> GuardSettings:
    """Returns which updates are skipped, and when a run ends."""
    return GuardSettings(**config.guard)


def identity(sizes: Any, always: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields of a model's sizes in which a checkpoint must agree.

    Without those of PARTS that have their default, as in checkpoints from before there
    were such parts; but with those of `always`.
    """
    values = {}
    for field in dataclasses.fields(sizes):
        value = getattr(sizes, field.name)
        is_optional = field.name in PARTS and field.name not in always
        if not (is_optional and value == field.default):
            if dataclasses.is_dataclass(value):
                value = identity(value)
            # As JSON has it, which is what a saved one is compared with.
            values[field.name] = list(value) if isinstance(value, tuple) else value
    return values
