"""A model without its parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from models.llama import parameter_axes
from models.partition import Partition


@dataclass(frozen=True)
class Model:
    """What is known of a model before it has parameters.

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
        """build: from a key to the module with its parameters.

        Raises:
          ValueError: a parameter does not divide over the mesh.
        """

        def create(key: jax.Array) -> Any:
            return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

        abstract = nnx.eval_shape(build, jax.random.key(0))
        structure, state = nnx.split(abstract, nnx.Param)
        shapes, axes = nnx.to_pure_dict(state), parameter_axes(abstract)
        jax.tree.map(lambda s, names: partition.spec(names, s.shape), shapes, axes)
        return cls(config, structure, shapes, axes, create)
