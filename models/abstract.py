"""Abstract models: shapes and axis names of the parameters, without their values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from models.execution import Partition


@dataclass(frozen=True)
class Model:
    """A model before it has parameters.

    config: its sizes, a dataclass.
    structure: graph definition, to be merged with parameters.
    shapes: of the parameters, a plain tree of `jax.ShapeDtypeStruct`.
    axes: names of the parameters' axes, a tree like it.
    create: from a key to the parameters.
    """

    config: Any
    structure: nnx.GraphDef
    shapes: Any
    axes: Any
    create: Callable[[jax.Array], Any]

    @classmethod
    def of(
        cls,
        config: Any,
        build: Callable[[jax.Array], nnx.Module],
        partition: Partition,
    ) -> "Model":
        """Traces `build`, from a key to the module with its parameters.

        Raises:
          ValueError: a parameter does not divide over the mesh.
        """

        def create(key: jax.Array) -> Any:
            return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

        abstract = nnx.eval_shape(build, jax.random.key(0))
        structure, state = nnx.split(abstract, nnx.Param)
        shapes, axes = nnx.to_pure_dict(state), _axes(abstract)
        jax.tree.map(lambda s, names: partition.spec(names, s.shape), shapes, axes)
        return cls(config, structure, shapes, axes, create)


def _axes(model: nnx.Module) -> dict:
    """Returns the names of every parameter's axes, a tree like the parameters."""

    def names(parameter: nnx.Param) -> tuple[str | None, ...]:
        stacked = parameter.get_value().ndim - len(parameter.axes)
        return (None,) * stacked + parameter.axes  # scanned layers come first

    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return nnx.traversals.unflatten_mapping({path: names(p) for path, p in flat})
