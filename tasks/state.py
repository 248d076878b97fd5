"""The train state of a run, the programs that change it, its identity in checkpoints.

A run with adapters (`config.lora`) freezes the parameters of `config.init_from`. Its
checkpoints hold the adapters and the identity of what they belong to.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from ml_collections import ConfigDict

from kernels.compiler import compiler_options
from models.abstract import Model
from models.sizes import LanguageModelConfig
from tasks.config_errors import names_fields
from training.guard import GuardSettings
from training.layerwise import STACKED
from training.loop import Programs
from training.mesh import Axes, Partition
from training.optimizer import OptimizerSettings, Storage
from training.step import (
    TrainState,
    initial_state,
    make_evaluate_step,
    make_replay,
)
from training.update import Optimizer
from training.weights import SavedParameters

if TYPE_CHECKING:
    from tasks.run import Data, Run

PARTS = {field.name for field in dataclasses.fields(LanguageModelConfig)}
PARTS = PARTS - {"rope_theta", "norm_epsilon"} | {"truncate", "action_bins"}
"""Fields that a fingerprint leaves out where they have their default."""

STORED = "moments", "parameters", "placement"
"""Fields of config.optimizer that are of `Storage`."""

BASE = "base_weights"
"""Key of the frozen parameters' identity in a fingerprint."""


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

    placed = functools.partial(_placed, partition)

    def param_placed(path: tuple, shape: Any, names: Axes) -> Any:
        is_far = optimizer.layers_on_host and path[0].key == STACKED
        return placed(shape, names, is_far)

    state_placed = functools.partial(placed, on_host=optimizer.on_host)
    state_axes = optimizer.axes(shapes.optimizer_state, axes)
    return TrainState(
        step=placed(shapes.step),
        params=jax.tree_util.tree_map_with_path(param_placed, shapes.params, axes),
        optimizer_state=jax.tree.map(state_placed, shapes.optimizer_state, state_axes),
        guard=jax.tree.map(placed, shapes.guard),
    )


def abstract_frozen(model: Model, partition: Partition) -> Any:
    """Returns shape, dtype and sharding of the frozen parameters."""
    return abstract_parameters(model.frozen_shapes, model.frozen_axes, partition)


def abstract_parameters(shapes: Any, axes: Any, partition: Partition) -> Any:
    """Returns parameters' shapes and types with the sharding of their axes."""
    return jax.tree.map(functools.partial(_placed, partition), shapes, axes)


def _placed(
    partition: Partition,
    shape: jax.ShapeDtypeStruct,
    names: Axes = (),
    on_host: bool = False,
) -> jax.ShapeDtypeStruct:
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
    found = {}
    for field in dataclasses.fields(sizes):
        value = getattr(sizes, field.name)
        is_optional = field.name in PARTS and field.name not in always
        if not (is_optional and value == field.default):
            is_nested = dataclasses.is_dataclass(value)
            found[field.name] = identity(value) if is_nested else value
    return found


def compile_programs(run: "Run", frozen: Any) -> Programs:
    """Compiles the run's programs; the replay, seldom needed, only when it is called.

    frozen: parameters that are not trained, with which the programs are called; an
      empty tree where all are.
    """
    config, state, batch = run.config, run.state_like, run.batch_like
    rest = (frozen,) if frozen else ()
    whole = state.step.sharding
    train_step = run.train_step().lower(state, batch, *rest).compile()
    evaluate = make_evaluate_step(run.held_out.loss_sum, run.held_out.count)
    options = compiler_options(whole.mesh.devices.flat[0].device_kind)
    evaluate = jax.jit(evaluate, out_shardings=whole, compiler_options=options)
    if config.train.validation_batches:
        evaluate = evaluate.lower(state.params, batch, *rest).compile()

    def beside(program: Callable) -> Callable:
        return lambda held, batch: program(held, batch, *rest)

    if not config.guard.replay:
        return Programs(beside(train_step), beside(evaluate), None)
    replay = make_replay(
        run.objective.loss_sum,
        microbatches=config.train.microbatches,
        count=run.objective.count,
    )
    replay = jax.jit(replay, out_shardings=whole, compiler_options=options)
    return Programs(*map(beside, (train_step, evaluate, replay)))


def first_state(run: "Run", data: "Data", say: Callable[[str], None]) -> TrainState:
    """Creates the sharded state of step 0, from `config.init_from` or at random.

    At random where the parameters of `config.init_from` are frozen.

    Raises:
      ValueError, FileNotFoundError: the parameters are missing.
    """
    config, like, optimizer = run.config, run.state_like, run.optimizer
    sharding = sharding_of(like)
    if not config.init_from or run.model.frozen_shapes:
        create = jax.jit(
            lambda key: initial_state(run.model.create(key), optimizer),
            out_shardings=sharding,
        )
        return create(jax.random.key(config.seed))
    saved = SavedParameters(config.init_from)
    saved.check_model(data.fingerprint, config.may_change)
    parameters = saved.restore(like.params)
    say(f"parameters: of step {saved.step} of {config.init_from}")
    begin = jax.jit(
        lambda parameters: initial_state(parameters, optimizer),
        out_shardings=sharding,
        donate_argnums=0,
    )
    return begin(parameters)


def identify_frozen(run: "Run") -> dict[str, str]:
    """Returns what a fingerprint says of the frozen parameters; nothing without any.

    Reads no array.

    Raises:
      ValueError, FileNotFoundError: the parameters are missing, or of another model.
    """
    config, model = run.config, run.model
    if not model.frozen_shapes:
        return {}
    saved = SavedParameters(config.init_from)
    sizes = identity(model.config)
    sizes.pop("lora")
    if "lora" in saved.fingerprint.get("model", {}):
        raise ValueError(
            f"{config.init_from=} holds adapters, and no model: export it with "
            "tools/convert_hf.py, which merges them, and import that"
        )
    saved.check_model({"model": sizes}, config.may_change)
    return {BASE: str(saved)}


def read_frozen(run: "Run", say: Callable[[str], None] = print) -> Any:
    """Reads the frozen parameters onto the mesh; an empty tree without them.

    Raises:
      ValueError: they are damaged, or do not fit the model.
    """
    config, model = run.config, run.model
    if not model.frozen_shapes:
        return {}
    saved = SavedParameters(config.init_from)
    frozen = saved.restore(abstract_frozen(model, run.partition))
    line = f"frozen parameters: of step {saved.step} of {config.init_from}"
    if saved.rounded:
        line += (
            f",\n  {saved.rounded} matrices rounded to bfloat16 "
            f"({config.compute_dtype=} {config.lora.base_dtype=})"
        )
    say(line)
    return frozen
