"""Abstract models: shapes and axis names of the parameters, without their values."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.memory import Partition


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
        frozen_dtype: Any = jnp.float32,
    ) -> "Model":
        """Traces `build`, from a key to the module with its parameters.

        trained: kind of the parameters that are trained; all others are frozen.
        frozen_dtype: of frozen matrices; what is not multiplied remains float32.

        Raises:
          ValueError: a parameter does not divide over the mesh.
        """
        kinds = trained, nnx.Param

        def create(key: jax.Array) -> Any:
            return nnx.to_pure_dict(nnx.state(build(key), *kinds)[0])

        def narrowed(shape: jax.ShapeDtypeStruct, names: tuple) -> Any:
            dtype = frozen_dtype if "embed" in names else shape.dtype
            return jax.ShapeDtypeStruct(shape.shape, dtype)

        abstract = nnx.eval_shape(build, jax.random.key(0))
        structure, *states = nnx.split(abstract, *kinds)
        shapes, frozen = map(nnx.to_pure_dict, states)
        axes, frozen_axes = map(_axes, states)
        for tree, names in ((shapes, axes), (frozen, frozen_axes)):
            jax.tree.map(lambda s, n: partition.spec(n, s.shape), tree, names)
        frozen = jax.tree.map(narrowed, frozen, frozen_axes)
        return cls(config, structure, shapes, axes, create, frozen, frozen_axes)


def joined(trained: Any, frozen: Any) -> Any:
    """Returns one tree of two trees of parameters that have none in common."""
    both = {
        name: joined(trained[name], frozen[name]) for name in trained if name in frozen
    }
    return {**frozen, **trained, **both}


def _axes(state: nnx.State) -> dict:
    """Returns the names of every parameter's axes, a tree like the parameters."""

    def names(parameter: nnx.Param) -> tuple[str | None, ...]:
        stacked = parameter.get_value().ndim - len(parameter.axes)
        return (None,) * stacked + parameter.axes  # scanned layers come first

    flat = nnx.to_flat_state(state)
    return nnx.traversals.unflatten_mapping({path: names(p) for path, p in flat})
