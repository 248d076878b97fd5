"""Turns gradients into new parameters: all at once, as optax and XLA do it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

Axes = tuple[str | None, ...]

standard_promotion = jax.numpy_dtype_promotion("standard")
"""Lets optax mix its int32 step count with floats, also under strict promotion."""


class Optimizer(Protocol):
    """Makes updates; its state is a tree of arrays.

    on_host: whether arrays of it with several axes are in the memory of the host.
    layers_on_host: whether parameters that are stacked are there, and their gradients.
    """

    @property
    def on_host(self) -> bool: ...

    @property
    def layers_on_host(self) -> bool: ...

    def cast(self, params: Any) -> Any:
        """Returns parameters in the types in which they are trained."""

    def init(self, params: Any) -> Any:
        """Returns the state before the first update."""

    def update(
        self, grads: Any, state: Any, params: Any, is_good: jax.Array | bool = True
    ) -> tuple[Any, Any]:
        """Returns the new parameters and state; the old ones where not `is_good`.

        grads: of the mean loss, of the parameters' types. is_good: bool scalar.
        """

    def axes(self, state: Any, axes: Any) -> Any:
        """Returns the names of the axes of every leaf of a state, None for no name.

        state: shapes, as of `init`. axes: names of the parameters' axes.
        """


@dataclass(frozen=True)
class AtOnce:
    """An optax transformation of all parameters, which XLA makes a few loops of."""

    transformation: optax.GradientTransformation
    on_host: bool = False
    layers_on_host: bool = False

    def cast(self, params: Any) -> Any:
        return params

    def init(self, params: Any) -> Any:
        return self.transformation.init(params)

    def update(
        self, grads: Any, state: Any, params: Any, is_good: jax.Array | bool = True
    ) -> tuple[Any, Any]:
        update = standard_promotion(self.transformation.update)
        updates, new_state = update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        # Chosen where it is written: with the old state donated, no copy is made.
        return chosen(is_good, (new_params, new_state), (params, state))

    def axes(self, state: Any, axes: Any) -> Any:
        named = by_keys(axes, is_leaf=lambda x: isinstance(x, tuple))

        def of(path: tuple[Any, ...], leaf: Any) -> Axes:
            # What is no parameter's, as a count, is whole on every device.
            return find(named, path) or (None,) * leaf.ndim

        return jax.tree_util.tree_map_with_path(of, state)


def float32(tree: Any) -> Any:
    """Returns the arrays as float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def global_norm(tree: Any) -> jax.Array:
    """Returns the norm of all numbers of a tree, float32.

    Stacked arrays in the host's memory are on the device a layer at a time.
    """
    far: list[jax.Array] = []
    near: list[jax.Array] = []
    for leaf in jax.tree.leaves(tree):
        if jax.typeof(leaf).memory_space == jax.memory.Space.Host:
            far.append(leaf)
        else:
            near.append(leaf)
    if not far:
        return optax.tree.norm(float32(tree))

    def add(number: jax.Array, total: jax.Array) -> jax.Array:
        # A layer at a time: the device may have no room for all of them.
        own = [lax.dynamic_slice_in_dim(x, number, 1) for x in far]
        own = jax.device_put(own, jax.memory.Space.Device)
        return total + optax.tree.norm(float32(own), squared=True)

    # Squares of all arrays together, before the one root: the norm of all numbers.
    start = optax.tree.norm(float32(near), squared=True)
    return jnp.sqrt(lax.fori_loop(0, len(far[0]), add, start))


def chosen(is_good: jax.Array | bool, new: Any, old: Any) -> Any:
    """Returns the arrays of one tree or those of the other."""
    return jax.tree.map(lambda n, o: jnp.where(is_good, n, o), new, old)


def by_keys(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> dict[tuple[str, ...], Any]:
    """Returns the leaves of a tree by the dict keys of their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    return {_keys(path): leaf for path, leaf in leaves}


def find[V](named: Mapping[tuple[str, ...], V], path: tuple[Any, ...]) -> V | None:
    """Returns what belongs to the parameter whose keys a path in a state ends with."""
    # Optax nests trees like the parameters' in its own: only the end of a path is a
    # parameter's, and the longest end that is one, as "scale" may end many.
    keys = _keys(path)
    for start in range(len(keys)):
        if keys[start:] in named:
            return named[keys[start:]]
    return None


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))
