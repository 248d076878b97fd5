"""Where operands lie: over explicit axes, as of `jax.make_mesh`, or in `shard_map`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


def over_mesh(
    local: Callable[..., Any], mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any
) -> Callable[..., Any]:
    """Maps a function of shards over a mesh: the result takes global operands.

    Every axis is in some spec but those over which the results are equal, and Pallas
    kernels cannot declare how theirs vary, so nothing is checked of that.
    """
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return lambda *operands: sharded(*resharded(mesh, in_specs, operands))


def resharded(mesh: Mesh, specs: Any, operands: Any) -> Any:
    """Returns operands sharded as `shard_map` wants them over explicit axes.

    specs: a `PartitionSpec` for each of the operands, or for each tree of them.
    """
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    # Over automatic axes XLA moves operands to where they are read by itself.
    if not explicit:
        return operands

    def of_dimension(names: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = (names,) if isinstance(names, str) else names or ()
        return tuple(name for name in names if name in explicit) or None

    def reshard(spec: PartitionSpec, tree: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*map(of_dimension, spec)))
        return jax.tree.map(lambda x: jax.reshard(x, sharding), tree)

    return jax.tree.map(reshard, specs, operands)


def whole_rows(x: Any) -> Any:
    """Gathers the rows of x (…, T) where explicit axes shard T, to be sliced.

    Over automatic axes XLA does, and NumPy arrays are whole.
    """
    spec = _explicit_spec(x)
    if not spec or not spec[-1]:
        return x
    mesh = jax.typeof(x).sharding.mesh
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*spec[:-1])))


def sharded_alike(arrays: Sequence[Any]) -> Sequence[Any]:
    """Shards arrays over explicit axes as the first that is, to be concatenated."""
    for x in arrays:
        if any(_explicit_spec(x)):
            return [jax.reshard(other, jax.typeof(x).sharding) for other in arrays]
    return arrays


def _explicit_spec(x: Any) -> tuple[Any, ...]:
    """Returns the explicit axes that each dimension is sharded over; () of NumPy's."""
    return tuple(jax.typeof(x).sharding.spec) if isinstance(x, jax.Array) else ()


def varying_alike(*operands: jax.Array | None) -> list[Any]:
    """Makes all vary over each mesh axis that one of them does, as `shard_map` checks.

    A gradient is summed over the axes over which its operand did not vary.
    """
    every = frozenset().union(*map(_varying, jax.tree.leaves(operands)))
    return jax.tree.map(lambda x: varying_over(every, x), list(operands))


def varying_over(axes: Iterable[str], x: jax.Array) -> jax.Array:
    """Makes x vary over mesh axes, if `shard_map` checks how it does."""
    manual = jax.sharding.get_abstract_mesh().manual_axes  # none in a vmap
    missing = tuple(sorted({*axes} & {*manual} - _varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _varying(x: jax.Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def check_local(is_kernel: bool, *operands: jax.Array) -> None:
    """Refuses operands that no loop or kernel of one device can take.

    is_kernel: and not a loop of XLA's.

    Raises:
      ValueError: `shard_map` checks how they vary over the mesh, or explicit axes shard
        them.
    """
    types = [jax.typeof(x) for x in operands]
    if is_kernel and any(map(_varying, operands)):
        raise ValueError(
            "attention must run in jax.shard_map(..., check_vma=False), or with "
            "implementation='blockwise': kernels cannot declare how their results vary "
            "over the mesh"
        )
    sharded = {name for kind in types for name in _axes(kind.sharding)}
    if sharded:
        raise ValueError(
            "attention here is of one device, and its operands are sharded over "
            f"{', '.join(sorted(sharded))}: use make_ring_attention(mesh, "
            "layout=Contiguous(), ring_axes=()), or implementation='reference'"
        )


def _axes(sharding: NamedSharding) -> Iterator[str]:
    """Lists the mesh axes of more than one device that an array is sharded over."""
    for names in sharding.spec:
        for name in (names,) if isinstance(names, str) else names or ():
            if sharding.mesh.shape[name] > 1:
                yield name
