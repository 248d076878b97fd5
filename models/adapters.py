"""Low-rank adapters (LoRA, 2106.09685): what is added to products with frozen matrices.

An adapter of a matrix, from inputs to outputs, is two factors, A (rank, inputs) and
B (rank, outputs): x W becomes x W + alpha / rank · (x Aᵀ) B. Only they are trained.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.execution import Axes, Partition

TARGETS = {
    "q": "query",
    "k": "key",
    "v": "value",
    "o": "output",
    "gate": "gate",
    "up": "up",
    "down": "down",
}
"""Matrices of a layer that may have an adapter: their short names, and those here."""

FACTORS = "a", "b"
"""Ends of the names of an adapter's parameters: `query_a` and `query_b`."""


@dataclass(frozen=True)
class Lora:
    """Adapters of the matrices of a decoder's layers.

    rank: of all of them; 0 for none. alpha: alpha / rank is a factor on each.
    targets: names of `TARGETS`, separated by commas.
    """

    rank: int = 0
    alpha: float = 16.0
    targets: str = ",".join(TARGETS)

    def __post_init__(self):
        found = []
        if not 0 <= self.rank < 1 << 31:
            found.append(f"rank={self.rank} must be at least 0, and 0 for no adapters")
        if not 0 < self.alpha < math.inf:
            found.append(f"alpha={self.alpha} must be a number above 0")
        given = self.targets.split(",")
        if not {*given} <= TARGETS.keys() or len({*given}) < len(given):
            found.append(
                f"targets={self.targets!r} must be some of {','.join(TARGETS)}, each "
                "once, separated by commas"
            )
        if found:
            raise ValueError("; ".join(found))

    @property
    def scale(self) -> float:
        """Returns the factor on what adapters give; 0 without any."""
        return self.alpha / self.rank if self.rank else 0.0

    @property
    def matrices(self) -> list[str]:
        """Returns the names here of the matrices that have adapters."""
        return [TARGETS[name] for name in self.targets.split(",") if self.rank]


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
    axes: Mapping[str, Axes],
    sides: tuple[Axes, Axes],
    summed: Axes = (),
) -> Callable[[jax.Array, Mapping[str, jax.Array]], jax.Array]:
    """Runs `function(x, weights)` on every device's shard of x, with whole weights.

    They travel in the type of x.

    axes: names of the axes of each weight; those with no "embed" are whole already.
    sides: names of the axes of x and of the result.
    summed: names of axes that results are summed over before such weights are used.
    """

    def call(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        def local(x: jax.Array, *shards: jax.Array) -> jax.Array:
            whole = {}
            for (name, weight), shard in zip(weights.items(), shards, strict=True):
                if "embed" not in axes[name]:
                    whole[name] = partition.vary(shard, but=summed)
                    continue
                place = axes[name].index("embed")
                size = weight.shape[place]
                whole[name] = partition.gather(shard, place, size, x.dtype)
            return function(partition.vary(x), whole)

        names = sides[0], *(axes[name] for name in weights)
        return partition.over_shards(local, names, sides[1])(x, *weights.values())

    return call


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


def _contract(x: jax.Array, weight: jax.Array, count: int, first: int = 0) -> jax.Array:
    """Sums over the last axes of x, and over as many of a weight from `first` on."""
    last, matched = range(-1, -1 - count, -1), range(first + count - 1, first - 1, -1)
    return jnp.tensordot(x, weight.astype(x.dtype), ([*last], [*matched]))
