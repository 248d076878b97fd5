"""Low-rank adapters (LoRA, 2106.09685): what is added to products with frozen matrices.

An adapter of a matrix, from inputs to outputs, is two factors, A (rank, inputs) and
B (rank, outputs): x W becomes x W + alpha / rank · (x Aᵀ) B. Only they are trained.
"""

import math
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models.lora import Lora
from models.memory import RESIDUAL, Axes, Partition, Weight

FACTORS = "a", "b"
"""Ends of the names of an adapter's parameters: `query_a` and `query_b`."""


Whole = Mapping[str, Weight]
"""Weights by name, as `over_whole` gives them to a device's function."""


class WithHeads(Protocol):
    """A module whose matrices `multiply_whole` multiplies with."""

    partition: Partition
    lora: Lora


def adapt(module: nnx.Module, lora: Lora, rngs: nnx.Rngs, **inputs: int) -> None:
    """Gives a module the factors of the matrices that it has, as PEFT draws them.

    A is drawn from ±1 / sqrt(inputs) (Kaiming's uniform with a = sqrt(5)), B is zero.

    inputs: how many of the leading axes of a matrix are its inputs, by its name.
    """
    for name in lora.matrices:
        if name not in inputs:
            continue
        matrix = getattr(module, name)
        count = inputs[name]
        a_shape = (lora.rank, *matrix.shape[:count])
        b_shape = (lora.rank, *matrix.shape[count:])
        bound = math.prod(matrix.shape[:count]) ** -0.5
        a = jax.random.uniform(
            rngs.params(), a_shape, jnp.float32, minval=-bound, maxval=bound
        )
        b = jnp.zeros(b_shape, jnp.float32)
        setattr(module, f"{name}_a", _factor(a, matrix.axes[:count]))
        setattr(module, f"{name}_b", _factor(b, matrix.axes[count:]))


def _factor(values: jax.Array, axes: Axes) -> nnx.LoRAParam:
    """Makes a factor (rank, …) of a matrix; axes: names of those after the rank."""
    # One axis of each factor is sharded as parameters are: the rank, if no other is.
    rank = None if "embed" in axes else "embed"
    return nnx.LoRAParam(values, axes=(rank, *axes))


def with_factors(module: object, *matrices: str) -> dict[str, nnx.Param]:
    """Returns these matrices of a module, and the factors that it has of them."""
    parameters = {}
    for matrix in matrices:
        for name in (matrix, *(f"{matrix}_{end}" for end in FACTORS)):
            if hasattr(module, name):
                parameters[name] = getattr(module, name)
    return parameters


def over_whole(
    partition: Partition,
    function: Callable[[jax.Array, Whole], jax.Array],
    x: jax.Array,
    parameters: Mapping[str, nnx.Param],
    sides: tuple[Axes, Axes],
    summed: Axes = (),
    parts: Mapping[str, jax.Array] | None = None,
    chunk: int = 0,
) -> jax.Array:
    """Runs `function(x, weights)` on every device's shard of x, with whole weights.

    They travel in the type of x.

    parameters: weights by name; those with no axis "embed" are whole already.
    sides: names of the axes of x and of the result.
    summed: names of axes that results are summed over before these weights are used.
    parts: which part of some parameters is used; None: the whole of each.
    chunk: tokens that weights are used for at a time; 0 for all of them.
    """
    weights = {name: parameter[...] for name, parameter in parameters.items()}
    if parts is not None:
        weights = {name: parts.get(name, weight) for name, weight in weights.items()}
    axes = {name: parameter.axes for name, parameter in parameters.items()}

    def local(x: jax.Array, *shards: jax.Array) -> jax.Array:
        whole: dict[str, Weight] = {}
        is_once = not 0 < chunk < math.prod(x.shape[:2])
        for name, shard in zip(weights, shards, strict=True):
            if "embed" not in axes[name]:
                whole[name] = partition.vary(shard, but=summed)
                continue
            axis = axes[name].index("embed")
            size = weights[name].shape[axis]
            is_factor = name.rpartition("_")[2] in FACTORS
            # A multiplier gathers in every product: it is for weights used once.
            if is_once and not is_factor:
                whole[name] = partition.multiplier(shard, axis, size, x.dtype)
            else:
                whole[name] = partition.gather(shard, axis, size, x.dtype)
        return function(partition.vary(x), whole)

    call = partition.over_shards(local, (sides[0], *axes.values()), sides[1])
    return call(x, *weights.values())


@jax.custom_vjp
def fork(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x twice, for two uses whose gradients are summed as soon as both exist.

    Otherwise XLA for GPUs makes one sum of all uses', and holds all of its terms.
    """
    return x, x


def _fork_forward(x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
    return fork(x), None


def _fork_backward(_: None, terms: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    first, second = terms
    return (jax.lax.optimization_barrier(first + second),)


fork.defvjp(_fork_forward, _fork_backward)


def multiply(
    x: jax.Array,
    weights: Whole,
    name: str,
    lora: Lora,
    inputs: int = 1,
) -> jax.Array:
    """Multiplies x (…, inputs) with a matrix, and with its adapter if it has one.

    weights: the matrix by its name, and its factors, in any type; the result, and the
      gradients of x, are of the type of x.
    inputs: the number of axes of the matrix's inputs.
    """
    if f"{name}_a" not in weights:
        return _contract(x, weights[name], inputs)
    x, other = fork(x)
    y = _contract(other, weights[name], inputs)
    z = lora.scale * _contract(x, weights[f"{name}_a"], inputs, first=1)  # (…, rank)
    b = weights[f"{name}_b"]  # (rank, …)
    assert isinstance(b, jax.Array)  # factors have no multiplier
    # With a batch axis, for which layers that keep their products do not keep this one
    # beside that of the matrix: it costs little to compute again.
    z = z[None]
    b = b.astype(x.dtype)[None]
    return y + jax.lax.dot_general(z, b, (((z.ndim - 1,), (1,)), ((0,), (0,))))[0]


def multiply_whole(
    module: WithHeads,
    x: jax.Array,
    name: str,
    sides: tuple[Axes, Axes],
    parts: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Multiplies x with a matrix of a module's heads, and with its adapter.

    sides: names of the axes of x and of the result; a residual is summed over heads.
    parts: as of `over_whole`.
    """
    partition = module.partition
    inputs = len(sides[0]) - 2

    def local(x: jax.Array, whole: Whole) -> jax.Array:
        y = multiply(x, whole, name, module.lora, inputs)
        return partition.total(y, ("heads",)) if sides[1] == RESIDUAL else y

    return over_whole(
        partition, local, x, with_factors(module, name), sides, parts=parts
    )


def _contract(x: jax.Array, weight: Weight, count: int, first: int = 0) -> jax.Array:
    """Sums over the last axes of x, and over as many of a weight from `first` on."""
    if callable(weight):
        return weight(x, count)
    axes_of_x = [*range(-1, -1 - count, -1)]
    axes_of_weight = [*range(first + count - 1, first - 1, -1)]
    return jnp.tensordot(x, weight.astype(x.dtype), (axes_of_x, axes_of_weight))
