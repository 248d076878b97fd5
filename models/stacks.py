"""Layers whose parameters are stacked in one array each, run one after the other."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.execution import Execution
from models.remat import remat


def through_stack(
    layers: nnx.Module,
    runs: Sequence[tuple[Execution, int]],
    kinds: Sequence[tuple],
    x: jax.Array,
) -> jax.Array:
    """Maps x through all layers of a stack, a loop for each run: x's shape and type.

    layers: with parameters (layers, …); `to_run` sets one of them to run as a run does.
      Those in the host's memory are copied a layer at a time, again in the backward;
      their gradients are there too.
    runs: how layers run, and how many of them.
    kinds: arguments of the layers after x, of a group of layers that repeats.
    """
    structure, parameters = nnx.split(layers)
    # The slices of a loop get the gradients; parts of a stack are read where they are.
    whole, start = lax.stop_gradient(parameters), 0
    is_here = all(_is_here(x) for x in jax.tree.leaves(parameters))
    reads_slices = is_here and len(runs) == len(kinds) == 1

    def layer(
        kind: int, run: Execution, x: jax.Array, number: jax.Array, own: Any
    ) -> jax.Array:
        if not reads_slices:
            own = jax.tree.map(lambda w, o: _pick(w, number, o), whole, own)
        return nnx.merge(structure, own).to_run(run)(x, *kinds[kind])

    for run, count in runs:

        def step(
            x: jax.Array, number: jax.Array, kind: int, own: Any, run: Execution = run
        ) -> jax.Array:
            run_layer = remat(functools.partial(layer, kind, run), run.remat)
            return run_layer(x, number, own)

        x = scan_layers(step, x, (start, start + count), len(kinds), parameters)
        start += count
    return x


def scan_layers(
    step: Callable[..., Any],
    carry: Any,
    span: tuple[int, int],
    kinds: int,
    stacked: Any = None,
) -> Any:
    """Runs carry = step(carry, number, kind, own) for the layers of a span.

    A loop over groups, with a layer of each kind, and the layers that are left.

    kinds: that layers take in turns, layer 0 the first of them.
    stacked: tree of (layers, …), of which `own` is the layer's; None for none.
    """
    first, stop = span
    while first < stop:
        size = min(kinds, stop - first)
        groups = (stop - first) // size

        def group(
            carry: Any, scanned: tuple, size: int = size, first: int = first
        ) -> tuple[Any, None]:
            number, slices = scanned
            for place in range(size):
                own = slices
                if size > 1:
                    own = jax.tree.map(operator.itemgetter(place), slices)
                carry = step(carry, number + place, (first + place) % kinds, own)
            return carry, None

        def grouped(
            x: jax.Array, groups: int = groups, size: int = size, first: int = first
        ) -> jax.Array:
            if groups * size < len(x):
                x = x[first : first + groups * size]
            return x.reshape(groups, size, *x.shape[1:]) if size > 1 else x

        numbers = jnp.arange(first, first + groups * size, size, dtype=jnp.int32)
        carry, _ = lax.scan(group, carry, (numbers, jax.tree.map(grouped, stacked)))
        first += groups * size
    return carry


@jax.custom_jvp
def _pick(whole: jax.Array, number: jax.Array, own: jax.Array) -> jax.Array:
    """Returns whole[number], on the device; `own` equals it and gets the gradient.

    From the host's memory as it is there: XLA for GPUs cannot reshape it before.
    """
    one = _to_device(lax.dynamic_slice_in_dim(whole, number, 1))
    return lax.squeeze(one, (0,))


@_pick.defjvp
def _pick_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _pick(*primals), _to_device(tangents[2])


def _is_here(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Device


def _to_device(x: jax.Array) -> jax.Array:
    return x if _is_here(x) else jax.device_put(x, jax.memory.Space.Device)
