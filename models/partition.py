"""What models ask of the mesh they run on; `training.mesh.Partition` answers."""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

Axes = tuple[str | None, ...]


class Partition(Protocol):
    """Places arrays on a mesh by the names of their axes; see `training.mesh`."""

    def spec(
        self, names: Axes, shape: tuple[int, ...]
    ) -> jax.sharding.PartitionSpec: ...

    def over_shards(
        self, function: Callable, names: Sequence[Axes], result_names: Axes
    ) -> Callable: ...

    def gather(
        self, shard: jax.Array, axis: int, size: int, dtype: jnp.dtype
    ) -> jax.Array: ...

    def vary(self, x: jax.Array) -> jax.Array: ...

    def total(self, x: jax.Array, names: Sequence[str]) -> jax.Array: ...

    def largest(self, x: jax.Array, name: str) -> jax.Array: ...

    def shard_number(self, name: str) -> jax.Array: ...

    def shards(self, name: str) -> int: ...
