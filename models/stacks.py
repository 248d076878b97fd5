"""Layers whose parameters are stacked in one array each, run one after the other."""

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
    x: jax.Array,
    *arguments: Any,
) -> jax.Array:
    """Maps x through all layers of a stack, a loop for each run: x's shape and type.

    layers: with parameters (layers, …); `to_run` sets one of them to run as a run does.
    runs: how layers run, and how many of them.
    arguments: of each layer, after x.
    """
    structure, parameters = nnx.split(layers)
    start = 0
    for run, count in runs:

        def layer(x: jax.Array, parameters: Any, run: Execution = run) -> tuple:
            return nnx.merge(structure, parameters).to_run(run)(x, *arguments), None

        x = _scan(layer, x, parameters, (start, start + count), run.remat)
        start += count
    return x


def _scan(
    layer: Callable, x: jax.Array, stacked: Any, span: tuple[int, int], policy: str
) -> jax.Array:
    """Maps x through the layers of a span, with no copy of their parameters."""
    start, stop = span
    if stop - start == jax.tree.leaves(stacked)[0].shape[0]:
        return lax.scan(remat(layer, policy), x, stacked)[0]
    whole = lax.stop_gradient(stacked)

    def numbered(x: jax.Array, scanned: tuple) -> tuple[jax.Array, None]:
        number, slices = scanned
        return layer(x, jax.tree.map(lambda w, s: _pick(w, number, s), whole, slices))

    # The slices are there for their gradients; the compiler sees them unused.
    slices = jax.tree.map(lambda w: w[start:stop], stacked)
    numbers = jnp.arange(start, stop, dtype=jnp.int32)
    return lax.scan(remat(numbered, policy), x, (numbers, slices))[0]


@jax.custom_jvp
def _pick(whole: jax.Array, number: jax.Array, own: jax.Array) -> jax.Array:
    """Returns whole[number], which `own` is equal to and gets the gradient of."""
    return lax.dynamic_index_in_dim(whole, number, keepdims=False)


@_pick.defjvp
def _pick_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return _pick(*primals), tangents[2]
