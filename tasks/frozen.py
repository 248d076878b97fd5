"""Parameters that a run does not train: read when it starts, and saved by no one.

A run with adapters (`config.lora`) freezes the parameters of `config.init_from`. Its
checkpoints hold the adapters and the identity of what they belong to.
"""

from collections.abc import Callable
from typing import Any

import jax

from models.abstract import Model
from tasks.run import Run
from tasks.state import identity
from training.mesh import Axes, Partition
from training.weights import SavedParameters

BASE = "base_weights"
"""Their identity's key in a fingerprint."""


def identify(run: Run) -> dict[str, str]:
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


def abstract_frozen(model: Model, partition: Partition) -> Any:
    """Returns shape, dtype and sharding of the frozen parameters."""
    return abstract_parameters(model.frozen_shapes, model.frozen_axes, partition)


def abstract_parameters(shapes: Any, axes: Any, partition: Partition) -> Any:
    """Returns parameters' shapes and types with the sharding of their axes."""

    def placed(shape: jax.ShapeDtypeStruct, names: Axes) -> jax.ShapeDtypeStruct:
        sharding = partition.sharding(names, shape.shape)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(placed, shapes, axes)


def read_frozen(run: Run, say: Callable[[str], None] = print) -> Any:
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
            f", {saved.rounded} matrices rounded to bfloat16 ({config.compute_dtype=} "
            f"{config.lora.base_dtype=})"
        )
    say(line)
    return frozen
