"""Parts of a decoder layer, and loops over layers whose parameters are stacked."""

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.adapters import adapt, multiply, over_whole, with_factors
from models.memory import RESIDUAL, Axes, Execution, Partition, remat, scan_chunks
from models.sizes import DecoderConfig

INITIAL_STDDEV = 0.02

GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
"""By `DecoderConfig.activation`."""


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple, stddev: float
) -> nnx.Param:
    """Draws a parameter of normal random numbers, whose axes have names."""
    values = stddev * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(values, axes=axes)


def zeros(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    """Makes a parameter of zeros, whose axes have names."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


class RMSNorm(nnx.Module):
    """Root mean square layer normalisation (1910.07467), over one axis or several."""

    def __init__(
        self, config: DecoderConfig, shape: tuple[int, ...], axes: Axes = (None,)
    ):
        """Makes a scale of this shape, that of the last axes."""
        self.offset = 1.0 if config.norm_unit_offset else 0.0
        self.scale = nnx.Param(jnp.full(shape, 1 - self.offset, jnp.float32), axes=axes)
        self.epsilon = config.norm_epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x (…, *shape) in float32; returns its shape and type."""
        return self.with_scale(x, self.scale[...])

    def with_scale(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """Does so with this module's scale where `over_shards` has passed it on."""
        wide = x.astype(jnp.float32)
        axes = tuple(range(-scale.ndim, 0))
        mean_square = jnp.mean(jnp.square(wide), axis=axes, keepdims=True)
        normal = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        scale = scale + self.offset if self.offset else scale
        return (normal * scale).astype(x.dtype)


class FeedForward(nnx.Module):
    """A gated feed-forward (GLU, 2002.05202), a chunk of the local tokens at a time."""

    def __init__(
        self,
        config: DecoderConfig,
        partition: Partition,
        chunk: int,
        *,
        rngs: nnx.Rngs,
    ):
        embed, wide = config.hidden_size, config.feed_forward_size
        out_stddev = INITIAL_STDDEV * (2 * config.num_layers) ** -0.5
        self.gate = matrix(rngs, (embed, wide), ("embed", "mlp"), INITIAL_STDDEV)
        self.up = matrix(rngs, (embed, wide), ("embed", "mlp"), INITIAL_STDDEV)
        self.down = matrix(rngs, (wide, embed), ("mlp", "embed"), out_stddev)
        self.lora = config.lora
        adapt(self, config.lora, rngs, gate=1, up=1, down=1)
        self.partition, self.chunk = partition, chunk
        self.activation = config.activation

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """Returns what the feed-forward adds to x: (B, T, E), as x.

        norm: of the result, made chunk by chunk too: its gradient needs the result,
          which would otherwise be computed again for all tokens.
        """
        partition, embed = self.partition, x.shape[-1]
        activate = GATES[self.activation]

        def local(x: jax.Array, whole: Mapping[str, jax.Array]) -> jax.Array:
            def product(tokens: jax.Array, name: str) -> jax.Array:
                # Cast there, so that the chunks' gradients add up in float32.
                return multiply(tokens, whole, name, self.lora)

            def gated(tokens: jax.Array) -> jax.Array:
                wide = activate(product(tokens, "gate"))  # (tokens, F)
                wide *= product(tokens, "up")
                y = product(wide, "down")  # (tokens, E)
                if norm is None:
                    return y
                return norm.with_scale(partition.total(y, summed), whole["norm"])

            tokens = x.reshape(-1, embed)  # (b · t, E)
            y = scan_chunks(gated, tokens, self.chunk or len(tokens)).reshape(x.shape)
            return partition.total(y, summed) if norm is None else y

        summed = ("mlp",)
        weights = with_factors(self, "gate", "up", "down")
        if norm is not None:
            weights["norm"] = norm.scale
        sides = RESIDUAL, RESIDUAL
        return over_whole(partition, local, x, weights, sides, summed, chunk=self.chunk)


def through_stack(
    layers: nnx.Module,
    runs: Sequence[tuple[Execution, int]],
    kinds: Sequence[tuple],
    x: jax.Array,
    others: nnx.Module | None = None,
    turns: Sequence[int] = (),
) -> jax.Array:
    """Maps x through all layers of a stack, a loop for each run: x's shape and type.

    layers: with parameters (layers, …); `to_run` sets one of them to run as a run does.
      Those in the host's memory are copied a layer at a time, again in the backward;
      their gradients are there too.
    runs: how layers run, and how many of them.
    kinds: arguments of the layers after x, of a group of layers that repeats.
    others: a second stack. turns: for each kind 1 where its layers are of that, else 0.
    """
    turns = turns or (0,) * len(kinds)
    stacks = [layers] if others is None else [layers, others]
    structures, parameters = zip(*map(nnx.split, stacks), strict=True)
    # The slices of a loop get the gradients; parts of a stack are read where they are.
    whole, start = lax.stop_gradient(parameters), 0
    is_here = all(_is_here(x) for x in jax.tree.leaves(parameters))
    reads_slices = is_here and len(runs) == len(kinds) == 1

    def layer(
        kind: int, run: Execution, x: jax.Array, number: jax.Array, own: Any
    ) -> jax.Array:
        stack = turns[kind]
        if not reads_slices:
            own = jax.tree.map(lambda w, o: _pick(w, number, o), whole[stack], own)
        return nnx.merge(structures[stack], own).to_run(run)(x, *kinds[kind])

    for run, count in runs:

        def step(
            x: jax.Array, number: jax.Array, kind: int, own: Any, run: Execution = run
        ) -> jax.Array:
            run_layer = remat(functools.partial(layer, kind, run), run.remat)
            return run_layer(x, number, own)

        x = scan_layers(step, x, (start, start + count), turns, parameters)
        start += count
    return x


def scan_layers(
    step: Callable[..., Any],
    carry: Any,
    span: tuple[int, int],
    turns: Sequence[int],
    stacked: Sequence[Any] | None = None,
) -> Any:
    """Runs carry = step(carry, number, kind, own) for the layers of a span.

    A loop over groups, with a layer of each kind, and the layers that are left.

    turns: for each kind that layers take in turns, layer 0 the first of them, the stack
      that its layers are in; `number` counts those of that stack.
    stacked: trees of (layers, …), of which `own` is the layer's; None for none.
    """
    first, stop = span
    while first < stop:
        size = min(len(turns), stop - first)
        groups = (stop - first) // size
        kinds = [(first + place) % len(turns) for place in range(size)]
        each = Counter(turns[kind] for kind in kinds)
        done = Counter(turns[number % len(turns)] for number in range(first))

        def group(
            carry: Any, scanned: tuple, kinds: list[int] = kinds, each: Counter = each
        ) -> tuple[Any, None]:
            (numbers, slices), places = scanned, Counter()
            for kind in kinds:
                stack = turns[kind]
                own, place = slices and slices[stack], places[stack]
                if each[stack] > 1:
                    own = jax.tree.map(operator.itemgetter(place), own)
                carry = step(carry, numbers[stack] + place, kind, own)
                places[stack] += 1
            return carry, None

        def grouped(
            x: jax.Array, start: int, size: int, groups: int = groups
        ) -> jax.Array:
            if groups * size < len(x):
                x = x[start : start + groups * size]
            return x.reshape(groups, size, *x.shape[1:]) if size > 1 else x

        numbers, slices = {}, stacked and {}
        for stack, size_of in each.items():
            start = done[stack]
            end = start + groups * size_of
            numbers[stack] = jnp.arange(start, end, size_of, dtype=jnp.int32)
            if stacked:
                cut = functools.partial(grouped, start=start, size=size_of)
                slices[stack] = jax.tree.map(cut, stacked[stack])
        carry, _ = lax.scan(group, carry, (numbers, slices))
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
