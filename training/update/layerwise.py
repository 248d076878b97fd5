"""Updates parameters layer by layer, from a state that is stored in few bits, or far.

Layers are stacked, [layers, …], and a loop takes them one after the other: what an
update needs in float32 exists for one layer at a time, and a state in the host's memory
passes through the device in slices. An optax transformation sees one layer, its weights
as matrices: so factors, norms and orthogonal updates are those of a layer's matrices.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from training.update.at_once import (
    Axes,
    by_keys,
    chosen,
    find,
    global_norm,
    standard_promotion,
)
from training.update.moments import FLOAT8, MOMENTS, decode, encode
from training.update.rounding import random_bits, stochastic_round

STACKED = "layers"
"""Name of the parameters that are stacked."""

PARAMETERS = "float32", "bfloat16"
PLACEMENTS = "device", "host", "host_all"


@dataclass(frozen=True)
class Storage:
    """How parameters and the optimizer's state are stored.

    Attributes:
      moments: type of the moments of matrices; "float8" in blocks with a scale each.
      parameters: type of the parameters that are matrices.
      placement: where the state is: in the memory of the "device" or of the "host";
        with "host_all" the layers' parameters and gradients are there too.
      seed: of what is rounded at random: whatever is not float32.

    Raises:
      ValueError: for an unknown name.
    """

    moments: str = "float32"
    parameters: str = "float32"
    placement: str = "device"
    seed: int = 0

    def __post_init__(self) -> None:
        known = {"moments": MOMENTS, "parameters": PARAMETERS, "placement": PLACEMENTS}
        check_names(self, known)


def check_names(settings: Any, known: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ValueError for each field whose value is none of those known."""
    wrong = []
    for name, choices in known.items():
        value = getattr(settings, name)
        if value not in choices:
            wrong.append(f"{name}={value!r} must be one of {', '.join(choices)}")
    if wrong:
        raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Weight:
    """One parameter, of one layer.

    shape, names: of its axes. is_matrix: whether it multiplies activations.
    """

    shape: tuple[int, ...]
    names: Axes
    is_matrix: bool

    @property
    def _inputs(self) -> int:
        """Number of axes of the input: heads' outputs have two."""
        return len(self.shape) - 1 if self.names[-1] == "embed" else 1

    @property
    def is_stack(self) -> bool:
        """Whether it is several matrices, of experts, which come first."""
        has_first = self.names[0] in (None, "experts")
        return self.is_matrix and len(self.shape) > 2 and has_first

    @property
    def view(self) -> tuple[int, ...]:
        """Shape of the matrix: inputs, outputs; a stack as it is."""
        if not self.is_matrix or self.is_stack:
            return self.shape
        inputs = math.prod(self.shape[: self._inputs])
        outputs = math.prod(self.shape[self._inputs :])
        return inputs, outputs

    @property
    def view_names(self) -> Axes:
        """Names of the matrix's axes: each the first of those that it is made of."""
        if not self.is_matrix or self.is_stack:
            return self.names
        inputs = self.names[: self._inputs]
        outputs = self.names[self._inputs :]
        return next(filter(None, inputs), None), next(filter(None, outputs), None)

    @property
    def block_axis(self) -> int:
        """Axis of the matrix along which moments are in blocks.

        A device has many consecutive elements along it: it is not "embed", over which
        parameters are sharded the finest, unless the other is a vocabulary, whose rows
        differ.
        """
        if self.is_stack:
            return len(self.shape) - (2 if self.names[-1] == "embed" else 1)
        inputs, outputs = self.view_names
        if "vocab" in (inputs, outputs):
            return 0 if inputs == "embed" and outputs != "embed" else 1
        return 0 if outputs == "embed" and inputs != "embed" else 1

    def state_names(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> Axes:
        """Returns the names of the axes of an array of optax's state.

        path: of the array, which has the name that optax gives it.
        """
        names = self.view_names
        fields = _field_names(path)
        if "scales" in fields:
            return (*names[: self.block_axis], None, *names[self.block_axis + 1 :])
        if len(shape) == len(names):
            return names
        # Adafactor's means: "v_row" has the shorter axis left, "v_col" the longer.
        if len(names) < 2:
            return (None,) * len(shape)
        shorter, longer = np.argsort(self.view, stable=True)[-2:]
        if "v_row" in fields and shape == (self.view[shorter],):
            return (names[shorter],)
        if "v_col" in fields and shape == (self.view[longer],):
            return (names[longer],)
        return (None,) * len(shape)


def _field_names(path: tuple[Any, ...]) -> set[str]:
    """Returns the names of the fields of records along a path of a tree."""
    return {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}


def weights_of(shapes: Any, axes: Any, is_matrix: Callable[[str], bool]) -> Any:
    """Returns a `Weight` for each parameter, a tree like theirs.

    is_matrix: from the name of a parameter.
    """

    def of(path: tuple[Any, ...], shape: Any, names: Axes) -> Weight:
        start = 1 if path[0].key == STACKED else 0
        matrix = is_matrix(path[-1].key)
        return Weight(shape.shape[start:], names[start:], matrix)

    return jax.tree_util.tree_map_with_path(of, shapes, axes)


class LayerwiseState(NamedTuple):
    """State of a layerwise optimizer.

    count: int32, updates made. layers: optax's state for the layers, stacked as they
    are. rest: that for what comes before and after them.
    """

    count: jax.Array
    layers: Any
    rest: Any


@dataclass(frozen=True)
class Layerwise:
    """An optimizer that goes through the layers.

    of_layer, of_rest: transformations of one layer's parameters, and of all others'.
    weights: see `weights_of`.
    storage: of state and parameters; what has one axis is on the device.
    clip_norm: largest norm of all gradients.
    """

    of_layer: optax.GradientTransformation
    of_rest: optax.GradientTransformation
    weights: Any
    storage: Storage
    clip_norm: float

    @property
    def on_host(self) -> bool:
        return self.storage.placement != "device"

    @property
    def layers_on_host(self) -> bool:
        return self.storage.placement == "host_all"

    def cast(self, params: Any) -> Any:
        return jax.tree.map(
            lambda x, weight: (
                x.astype(self.storage.parameters) if weight.is_matrix else x
            ),
            params,
            self.weights,
        )

    def init(self, params: Any) -> LayerwiseState:
        def first(transformation: optax.GradientTransformation, params: Any) -> Any:
            key = jax.random.key(0)  # of zeros, which are stored as they are
            return self._stored(transformation.init(self._matrices(params)), key)

        layers, rest = _split(params)
        if layers:
            layers = jax.vmap(functools.partial(first, self.of_layer))(layers)
        count = jnp.zeros((), jnp.int32)
        return LayerwiseState(count, layers, first(self.of_rest, rest))

    def update(
        self,
        grads: Any,
        state: LayerwiseState,
        params: Any,
        is_good: jax.Array | bool = True,
    ) -> tuple[Any, LayerwiseState]:
        # Of all layers, before one of them is updated: clipping each by its own norm
        # would be another optimizer.
        norm = global_norm(grads)
        factor = jnp.where(norm < self.clip_norm, 1, self.clip_norm / norm)
        # From the count alone: a run that resumes rounds as it would have undisturbed.
        key = jax.random.fold_in(jax.random.key(self.storage.seed), state.count)

        layers, rest = _split(params)
        layer_grads, rest_grads = _split(grads)
        count = len(jax.tree.leaves(layers)[0]) if layers else 0

        def through(number: jax.Array, old: tuple[Any, Any]) -> tuple[Any, Any]:
            take = functools.partial(_take_layer, number)
            put = functools.partial(_put_layer, number)
            grads, params, state = jax.tree.map(take, (layer_grads, *old))
            own_key = jax.random.fold_in(key, number)
            new = self._updated(
                self.of_layer, factor, is_good, own_key, grads, params, state
            )
            # In place: the loop carries the donated arrays, so that no second copy of
            # parameters or state exists, on the device or on the host.
            return jax.tree.map(put, old, new)

        layers, layers_state = lax.fori_loop(0, count, through, (layers, state.layers))
        spaces = jax.tree.map(lambda x: jax.typeof(x).memory_space, state.rest)
        rest_state = jax.device_put(state.rest, jax.memory.Space.Device)
        # Numbered after the layers: its random bits are those of none of them.
        own_key = jax.random.fold_in(key, count)
        rest, rest_state = self._updated(
            self.of_rest, factor, is_good, own_key, rest_grads, rest, rest_state
        )
        rest_state = jax.tree.map(jax.device_put, rest_state, spaces)
        # A skipped update is not counted, as in optax's states: else schedule and bias
        # correction would run ahead of the updates made.
        number = state.count + jnp.asarray(is_good, jnp.int32)
        return {**rest, **layers}, LayerwiseState(number, layers_state, rest_state)

    def _updated(
        self,
        transformation: optax.GradientTransformation,
        factor: jax.Array,
        is_good: jax.Array | bool,
        key: jax.Array,
        grads: Any,
        params: Any,
        state: Any,
    ) -> tuple[Any, Any]:
        """Returns the new parameters and state of one layer, or of the rest.

        factor: of the gradients, which clips them. key: of what is rounded here.
        """
        # One for parameters, one for moments: rounded by the same bits both would err
        # in the same elements.
        keys = jax.random.split(key)
        grads = jax.tree.map(lambda g: factor * g, self._matrices(grads))
        wide = self._matrices(params)
        update = standard_promotion(transformation.update)
        updates, new = update(grads, decode(state), wide)
        # In float32, and rounded at random: to the nearest, bfloat16 would lose each
        # update below half of its unit, and the parameter would stand still.
        wide = jax.tree.map(jnp.add, wide, updates)
        new = _rounded(wide, params, keys[0]), self._stored(new, keys[1])
        return chosen(is_good, new, (params, state))

    def axes(self, state: LayerwiseState, axes: Any) -> Any:
        named = by_keys(self.weights)

        def of(path: tuple[Any, ...], leaf: Any) -> Axes:
            stacked: Axes = (None,) if path[0].name == STACKED else ()
            weight = find(named, path)
            inner = leaf.shape[len(stacked) :]
            if weight is None:
                return (*stacked, *(None,) * len(inner))
            return stacked + weight.state_names(path, inner)

        return jax.tree_util.tree_map_with_path(of, state)

    def _matrices(self, tree: Any) -> Any:
        """Returns parameters, or what is like them, as float32 matrices."""
        weights = {name: self.weights[name] for name in tree}
        return jax.tree.map(
            lambda x, weight: x.astype(jnp.float32).reshape(weight.view), tree, weights
        )

    def _stored(self, state: Any, key: jax.Array) -> Any:
        """Returns optax's state with the moments of matrices in fewer bits."""
        named = by_keys(self.weights)
        leaves = len(jax.tree.leaves(state))
        words = iter(jax.random.bits(key, (leaves,), jnp.uint32))

        def of(path: tuple[Any, ...], x: jax.Array) -> Any:
            weight = find(named, path)
            # Of each leaf, so that none's depends on the others' types.
            word = next(words)
            moment = next(iter(_field_names(path) & set(FLOAT8)), None)
            if moment is None or weight is None or not weight.is_matrix:
                return x
            if self.storage.moments == "float32":
                return x
            if self.storage.moments == "float8":
                return encode(x, moment, weight.block_axis, word)
            return stochastic_round(x, random_bits(word, x.shape), jnp.bfloat16)

        return jax.tree_util.tree_map_with_path(of, state)


def _take_layer(number: jax.Array, whole: jax.Array) -> jax.Array:
    """Returns a layer of a stacked array, on the device."""
    # From the host as it is there: XLA for GPUs cannot reshape it before.
    layer = lax.dynamic_slice_in_dim(whole, number, 1)  # (1, …)
    layer = jax.device_put(layer, jax.memory.Space.Device)
    return lax.squeeze(layer, (0,))


def _put_layer(number: jax.Array, whole: jax.Array, layer: jax.Array) -> jax.Array:
    """Returns a stacked array, where it is, with a layer replaced."""
    layer = jax.device_put(layer[None], jax.typeof(whole).memory_space)
    return lax.dynamic_update_slice_in_dim(whole, layer, number, 0)


def _rounded(wide: Any, like: Any, key: jax.Array) -> Any:
    """Returns float32 parameters in the shapes and types of others."""
    # A word for each leaf, rounded or not: the bits of one do not depend on the types
    # of the others.
    words = iter(jax.random.bits(key, (len(jax.tree.leaves(like)),), jnp.uint32))

    def of(x: jax.Array, like: jax.Array) -> jax.Array:
        x = x.reshape(like.shape)
        word = next(words)
        if like.dtype == jnp.float32:
            return x
        return stochastic_round(x, random_bits(word, x.shape), like.dtype)

    return jax.tree.map(of, wide, like)


def _split(params: Any) -> tuple[Any, Any]:
    """Returns the stacked parameters, and all others."""
    layers = {STACKED: params[STACKED]} if STACKED in params else {}
    return layers, {name: params[name] for name in params if name not in layers}
