"""Abstract models: shapes and axis names of the parameters, without their values."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from models.memory import SHARED_OUT, Axes, Partition


@dataclass(frozen=True)
class Model:
    """A model before it has parameters.

    config: its sizes, a dataclass.
    structure: graph definition, to be merged with parameters.
    shapes: of the parameters that are trained, a plain tree of `jax.ShapeDtypeStruct`.
    axes: names of the parameters' axes, a tree like it.
    create: from a key to the parameters that are trained.
    frozen_shapes, frozen_axes: of those that are not; empty where all are trained.
    """

    config: Any
    structure: nnx.GraphDef
    shapes: Any
    axes: Any
    create: Callable[[jax.Array], Any]
    frozen_shapes: Any = field(default_factory=dict)
    frozen_axes: Any = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        config: Any,
        build: Callable[[jax.Array], nnx.Module],
        partition: Partition,
        *,
        trained: type[nnx.Param] = nnx.Param,
        frozen_dtype: DTypeLike = jnp.float32,
    ) -> "Model":
        """Traces `build`, from a key to the module with its parameters.

        trained: kind of the parameters that are trained; all others are frozen.
        frozen_dtype: of frozen matrices; what is not multiplied remains float32.

        Raises:
          ValueError: a parameter does not divide over the mesh.
        """

        def create(key: jax.Array) -> Any:
            state, _ = nnx.state(build(key), trained, nnx.Param)
            return nnx.to_pure_dict(state)

        def narrowed(shape: jax.ShapeDtypeStruct, names: Axes) -> jax.ShapeDtypeStruct:
            is_matrix = SHARED_OUT.intersection(names)
            dtype = frozen_dtype if is_matrix else shape.dtype
            return jax.ShapeDtypeStruct(shape.shape, dtype)

        def check(shape: jax.ShapeDtypeStruct, names: Axes) -> None:
            partition.spec(names, shape.shape)  # raises

        abstract = nnx.eval_shape(build, jax.random.key(0))
        structure, trained_state, frozen_state = nnx.split(abstract, trained, nnx.Param)
        shapes = nnx.to_pure_dict(trained_state)
        axes = _axes(trained_state)
        frozen_shapes = nnx.to_pure_dict(frozen_state)
        frozen_axes = _axes(frozen_state)
        jax.tree.map(check, shapes, axes)
        jax.tree.map(check, frozen_shapes, frozen_axes)
        return cls(
            config,
            structure,
            shapes,
            axes,
            create,
            frozen_shapes=jax.tree.map(narrowed, frozen_shapes, frozen_axes),
            frozen_axes=frozen_axes,
        )


def joined(trained: Any, frozen: Any) -> Any:
    """Returns one tree of two trees of parameters that have none in common."""
    tree = {**frozen, **trained}
    for name in trained.keys() & frozen.keys():
        tree[name] = joined(trained[name], frozen[name])
    return tree


def _axes(state: nnx.State) -> dict:
    """Returns the names of every parameter's axes, a tree like the parameters."""

    def names(parameter: nnx.Param) -> Axes:
        stacked = parameter.get_value().ndim - len(parameter.axes)
        return (None,) * stacked + parameter.axes  # scanned layers come first

    flat = {path: names(parameter) for path, parameter in nnx.to_flat_state(state)}
    return nnx.traversals.unflatten_mapping(flat)
