"""Operands of `jax.shard_map` on meshes of explicit axes, as of `jax.make_mesh`."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def placed(mesh: Mesh, specs: Any, operands: Any) -> Any:
    """Returns operands as `shard_map` wants them: over explicit axes it moves nothing.

    specs: a `PartitionSpec` for each of the operands, or for each tree of them.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    if not explicit:
        return operands

    def of_dimension(names: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = (names,) if isinstance(names, str) else names or ()
        return tuple(name for name in names if name in explicit) or None

    def place(spec: PartitionSpec, tree: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*map(of_dimension, spec)))
        return jax.tree.map(lambda x: jax.reshard(x, sharding), tree)

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    return jax.tree.map(place, specs, operands, is_leaf=is_spec)
