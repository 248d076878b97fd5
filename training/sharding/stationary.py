"""A partition for programs with few tokens, in which parameters stay where they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from training.sharding.mesh import Axes, Partition


@dataclass(frozen=True)
class StationaryPartition(Partition):
    """For programs with few tokens: activations travel, and parameters do not.

    Each device multiplies with the shards that it has (weight-stationary, 2211.05102):
    functions see whole arrays, XLA cuts their products by the shardings of the
    parameters, and only activations are summed and gathered. The sequence is not
    sharded, and the batch over `data` alone: `fsdp` cuts the parameters.
    """

    @property
    def kernel_units(self) -> None:
        """None: XLA cannot cut kernels by the parameters' axes."""
        return None

    def over_shards(
        self,
        function: Callable,
        names: Sequence[Axes],
        result_names: Axes,
        beside: Axes | None = None,
    ) -> Callable:
        """Runs `function` on whole arrays; its result is sharded by its names."""
        if beside is not None:
            return function  # XLA shards both results as what they are made of
        axes = [self._axes_of_result(name) or None for name in result_names]
        is_hidden = result_names[2:] == (None,)
        has_columns = any(of_argument[-1:] == ("embed",) for of_argument in names)

        def call(*arrays: jax.Array) -> jax.Array:
            result = function(*arrays)
            if is_hidden and has_columns:
                # Columns first where those of the parameter lie: else XLA may make
                # the parameter whole, instead of the result.
                columns = self.mesh_axes("embed", result.shape[-1])
                result = self._constrained(result, [*axes[:-1], columns or None])
            return self._constrained(result, axes)

        return call

    def _axes_of_result(self, name: str | None) -> tuple[str, ...]:
        if name == "batch":
            return ("data",)
        return () if name == "sequence" else self.axes(name)

    def _constrained(
        self, x: jax.Array, axes: Sequence[tuple[str, ...] | None]
    ) -> jax.Array:
        sharding = NamedSharding(self.mesh, PartitionSpec(*axes))
        return jax.lax.with_sharding_constraint(x, sharding)

    def gather(
        self, shard: jax.Array, axis: int, size: int, dtype: jnp.dtype
    ) -> jax.Array:
        return shard

    multiplier = gather

    def vary(self, x: jax.Array, but: Sequence[str | None] = ()) -> jax.Array:
        return x

    def total(self, x: jax.Array, names: Sequence[str]) -> jax.Array:
        return x

    def largest(self, x: jax.Array, name: str) -> jax.Array:
        return x

    def shard_number(self, name: str) -> jax.Array:
        return jnp.zeros((), jnp.int32)

    def shards(self, name: str | tuple[str, ...]) -> int:
        return 1 if isinstance(name, str) else super().shards(name)
