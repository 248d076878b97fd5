"""Low-rank adapters (LoRA, 2106.09685): what is added to products with frozen matrices.

An adapter of a matrix, from inputs to outputs, is two factors, A (rank, inputs) and
B (rank, outputs): x W becomes x W + alpha / rank · (x Aᵀ) B. Only they are trained.
"""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.memory import RESIDUAL, Axes, Partition
from models.sizes import Lora

FACTORS = "a", "b"
"""Ends of the names of an adapter's parameters: `query_a` and `query_b`."""


def adapt(module: nnx.Module, lora: Lora, rngs: nnx.Rngs, **inputs: int) -> None:
    """Gives a module the factors of the matrices that it has, as PEFT draws them.

    A is drawn from ±1 / sqrt(inputs) (Kaiming's uniform with a = sqrt(5)), B is zero.

    inputs: how many of the leading axes of a matrix are its inputs, by its name.
    """
    for name in (name for name in lora.matrices if name in inputs):
        matrix, count = getattr(module, name), inputs[name]
        sides = matrix.shape[:count], matrix.shape[count:]
        bound = math.prod(sides[0]) ** -0.5
        shapes = [(lora.rank, *side) for side in sides]
        a = jax.random.uniform(
            rngs.params(), shapes[0], jnp.float32, minval=-bound, maxval=bound
        )
        names = matrix.axes[:count], matrix.axes[count:]
        factors = zip(
            FACTORS, (a, jnp.zeros(shapes[1], jnp.float32)), names, strict=True
        )
        for end, values, axes in factors:
            # Each factor has one axis that is shared out as parameters are.
            rank = None if "embed" in axes else "embed"
            setattr(module, f"{name}_{end}", nnx.LoRAParam(values, axes=(rank, *axes)))


def with_factors(module: nnx.Module, *names: str) -> dict[str, nnx.Param]:
    """Returns these matrices of a module, and the factors that it has of them."""
    wanted = (n for name in names for n in (name, *(f"{name}_{e}" for e in FACTORS)))
    return {name: getattr(module, name) for name in wanted if hasattr(module, name)}


def over_whole(
    partition: Partition,
    function: Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array],
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
    parts: what is used of some parameters; None for all of all.
    chunk: tokens that weights are used for at a time; 0 for all of them.
    """
    weights = {n: (parts or {}).get(n, p) for n, p in parameters.items()}
    axes = {name: parameter.axes for name, parameter in parameters.items()}

    def local(x: jax.Array, *shards: jax.Array) -> jax.Array:
        whole = {}
        is_once = not 0 < chunk < math.prod(x.shape[:2])
        for (name, weight), shard in zip(weights.items(), shards, strict=True):
            if "embed" not in axes[name]:
                whole[name] = partition.vary(shard, but=summed)
                continue
            place = axes[name].index("embed")
            size = weight.shape[place]
            is_factor = name.rpartition("_")[2] in FACTORS
            take = (
                partition.multiplier if is_once and not is_factor else partition.gather
            )
            whole[name] = take(shard, place, size, x.dtype)
        return function(partition.vary(x), whole)

    call = partition.over_shards(local, (sides[0], *axes.values()), sides[1])
    return call(x, *(weight[...] for weight in weights.values()))


@jax.custom_vjp
def fork(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x twice, for two uses whose gradients are summed as soon as both exist.

    Otherwise XLA for GPUs makes one sum of all uses', and holds all of its terms.
    """
    return x, x


def _fork_forward(x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
    return fork(x), None


def _fork_backward(_: None, terms: tuple[jax.Array, jax.Array]) -> tuple[jax.Array]:
    return (jax.lax.optimization_barrier(operator.add(*terms)),)


fork.defvjp(_fork_forward, _fork_backward)


def multiply(
    x: jax.Array,
    weights: Mapping[str, jax.Array],
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
    a, b = (weights[f"{name}_{end}"] for end in FACTORS)
    z = lora.scale * _contract(x, a, inputs, first=1)  # (…, rank)
    # With a batch axis, for which layers that keep their products do not keep this one
    # beside that of the matrix: it costs little to compute again.
    z, b = z[None], b.astype(x.dtype)[None]
    return y + jax.lax.dot_general(z, b, (((z.ndim - 1,), (1,)), ((0,), (0,))))[0]


def multiply_whole(
    module: Any,
    x: jax.Array,
    name: str,
    sides: tuple[Axes, Axes],
    parts: Mapping[str, jax.Array] | None = None,
) -> jax.Array:
    """Multiplies x with a matrix of a module's heads, and with its adapter.

    sides: names of the axes of x and of the result; a residual is summed over heads.
    parts: as of `over_whole`.
    """
    partition, inputs = module.partition, len(sides[0]) - 2

    def local(x: jax.Array, whole: Mapping[str, jax.Array]) -> jax.Array:
        y = multiply(x, whole, name, module.lora, inputs)
        return partition.total(y, ("heads",)) if sides[1] == RESIDUAL else y

    return over_whole(
        partition, local, x, with_factors(module, name), sides, parts=parts
    )


def _contract(x: jax.Array, weight: jax.Array, count: int, first: int = 0) -> jax.Array:
    """Sums over the last axes of x, and over as many of a weight from `first` on."""
    if callable(weight):
        return weight(x, count)
    last, matched = range(-1, -1 - count, -1), range(first + count - 1, first - 1, -1)
    return jnp.tensordot(x, weight.astype(x.dtype), ([*last], [*matched]))
