"""Parts of a decoder layer, and loops over layers whose parameters are stacked."""

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.adapters import Whole, adapt, multiply, over_whole, with_factors
from models.chunks import scan_chunks
from models.memory import RESIDUAL, Axes, Execution, Partition, remat
from models.sizes import DecoderConfig

INITIAL_STDDEV = 0.02

GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}
"""By `DecoderConfig.activation`."""

CLAMP, SHARPNESS = 7.0, 1.702
"""Of the activation of gpt-oss: the largest gate, and the factor in its sigmoid."""


def glu(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns the hidden numbers of a feed-forward, in float32.

    "clamped": (min(up, 7, at least -7) + 1) · g · sigmoid(1.702 g), of min(gate, 7), as
    gpt-oss has it.
    """
    gate = gate.astype(jnp.float32)
    up = up.astype(jnp.float32)
    if activation != "clamped":
        return GATES[activation](gate) * up
    gate = jnp.minimum(gate, CLAMP)
    return (jnp.clip(up, -CLAMP, CLAMP) + 1) * gate * jax.nn.sigmoid(SHARPNESS * gate)


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
        embed = config.hidden_size
        wide = config.feed_forward_size
        out_stddev = INITIAL_STDDEV * (2 * config.num_layers) ** -0.5
        self.gate = matrix(rngs, (embed, wide), ("embed", "mlp"), INITIAL_STDDEV)
        self.up = matrix(rngs, (embed, wide), ("embed", "mlp"), INITIAL_STDDEV)
        self.down = matrix(rngs, (wide, embed), ("mlp", "embed"), out_stddev)
        self.lora = config.lora
        adapt(self, config.lora, rngs, gate=1, up=1, down=1)
        self.partition = partition
        self.chunk = chunk
        self.activation = config.activation

    def __call__(self, x: jax.Array, norm: RMSNorm | None = None) -> jax.Array:
        """Returns what the feed-forward adds to x: (B, T, E), as x.

        norm: of the result, made chunk by chunk too: its gradient needs the result,
          which would otherwise be computed again for all tokens.
        """
        weights = with_factors(self, "gate", "up", "down")
        if norm is not None:
            weights["norm"] = norm.scale
        local = functools.partial(self._of_shard, norm=norm)
        sides = (RESIDUAL, RESIDUAL)
        options = {"summed": ("mlp",), "chunk": self.chunk}
        return over_whole(self.partition, local, x, weights, sides, **options)

    def _of_shard(self, x: jax.Array, whole: Whole, norm: RMSNorm | None) -> jax.Array:
        """Returns the feed-forward of a device's tokens x (b, t, E).

        whole: matrices, of which a device has some columns of gate and up, and the rows
          of down that belong to these; and the scale of the norm.
        """
        tokens = x.reshape(-1, x.shape[-1])  # (b · t, E)
        run_chunk = functools.partial(self._of_chunk, whole=whole, norm=norm)
        y = scan_chunks(run_chunk, tokens, self.chunk or len(tokens)).reshape(x.shape)
        return self.partition.total(y, ("mlp",)) if norm is None else y

    def _of_chunk(self, x: jax.Array, whole: Whole, norm: RMSNorm | None) -> jax.Array:
        """Returns the feed-forward of x (tokens, E); summed only where a norm is."""
        # Weights are cast in `multiply`, so that the chunks' gradients add up in
        # float32.
        wide = GATES[self.activation](multiply(x, whole, "gate", self.lora))
        wide *= multiply(x, whole, "up", self.lora)  # (tokens, F)
        y = multiply(wide, whole, "down", self.lora)  # (tokens, E)
        if norm is None:
            return y
        scale = whole["norm"]
        assert isinstance(scale, jax.Array)  # no matrix, so no multiplier
        return norm.with_scale(self.partition.total(y, ("mlp",)), scale)


def through_stack[Stream](
    layers: nnx.Module,
    runs: Sequence[tuple[Execution, int]],
    inputs: Sequence[object],
    x: Stream,
    others: nnx.Module | None = None,
    stack_of_kind: Sequence[int] = (),
) -> Stream:
    """Maps x through all layers of a stack, a loop for each run: x's shape and type.

    x: an array, or a tree of arrays.

    layers: with parameters (layers, …); `to_run` sets one of them to run as a run does.
      Those in the host's memory are copied a layer at a time, again in the backward;
      their gradients are there too.
    runs: how layers run, and how many of them.
    inputs: what layers are called with beside x, for each of the kinds that layers take
      in turns.
    others: a second stack, of layers that are called with the same inputs.
    stack_of_kind: for each kind 1 where its layers are in the second stack, else 0; ()
      with one stack.
    """
    stacks = [layers] if others is None else [layers, others]
    structures, parameters = zip(*map(nnx.split, stacks), strict=True)
    is_on_device = all(map(_is_on_device, jax.tree.leaves(parameters)))
    loop = _LayerLoop(
        structures,
        lax.stop_gradient(parameters),
        inputs,
        stack_of_kind or (0,) * len(inputs),
        reads_slices=is_on_device and len(runs) == len(inputs) == 1,
    )
    start = 0
    for run, count in runs:
        step = functools.partial(loop.step, run)
        span = (start, start + count)
        x = scan_layers(step, x, span, loop.stack_of_kind, parameters)
        start += count
    return x


@dataclass(frozen=True)
class _LayerLoop:
    """What the steps of `through_stack` read.

    structures, whole: of each stack, its graph definition and parameters (layers, …)
      without gradients. The slices of a loop get the gradients; where several loops
      read a stack, its values are read from `whole`, so that no part of it is copied.
    inputs, stack_of_kind: as of `through_stack`, for each kind.
    reads_slices: whether values are read from the slices too.
    """

    structures: Sequence[nnx.GraphDef]
    whole: Sequence[Any]
    inputs: Sequence[object]
    stack_of_kind: Sequence[int]
    reads_slices: bool

    def step[Stream](
        self, run: Execution, x: Stream, number: jax.Array, kind: int, own: Any
    ) -> Stream:
        """Runs layer `number` of its stack; `own`: the slices of its parameters."""
        run_layer = remat(functools.partial(self._layer, run, kind), run.remat)
        return run_layer(x, number, own)

    def _layer[Stream](
        self, run: Execution, kind: int, x: Stream, number: jax.Array, own: Any
    ) -> Stream:
        stack = self.stack_of_kind[kind]
        if not self.reads_slices:
            own = jax.tree.map(
                lambda whole, slice: _pick(whole, number, slice), self.whole[stack], own
            )
        layer = nnx.merge(self.structures[stack], own)
        return layer.to_run(run)(x, self.inputs[kind])


class _Groups(NamedTuple):
    """Groups of layers that a loop runs, one after the other.

    first: number of the first layer. count: groups.
    kinds: of a group's layers, in their order.
    """

    first: int
    count: int
    kinds: Sequence[int]


def scan_layers[Carry](
    step: Callable[[Carry, jax.Array, int, Any], Carry],
    carry: Carry,
    span: tuple[int, int],
    stack_of_kind: Sequence[int],
    parameters: Sequence[Any] | None = None,
) -> Carry:
    """Runs carry = step(carry, number, kind, own) for the layers of a span.

    A loop over groups, with a layer of each kind, and one over the layers that are
    left. Within a group a loop runs neighbouring layers of the second stack.

    span: numbers of the first layer and of the one behind the last.
    stack_of_kind: for each kind that layers take in turns, layer 0 the first of them,
      the stack that its layers are in; `number` counts those of that stack.
    parameters: of each stack a tree of (layers, …), of which `own` is the layer's; None
      for none.
    """
    for groups in _groups_of(span, len(stack_of_kind)):
        before = Counter(
            stack_of_kind[n % len(stack_of_kind)] for n in range(groups.first)
        )
        in_group = Counter(stack_of_kind[kind] for kind in groups.kinds)
        numbers: dict[int, jax.Array] = {}  # of each group's first layer, by stack
        slices: dict[int, Any] = {}
        for stack, size in in_group.items():
            start = before[stack]
            end = start + groups.count * size
            numbers[stack] = jnp.arange(start, end, size, dtype=jnp.int32)
            if parameters is not None:
                cut = functools.partial(_cut_groups, start=start, end=end, size=size)
                slices[stack] = jax.tree.map(cut, parameters[stack])
        run_group = functools.partial(_run_group, step, groups.kinds, stack_of_kind)
        carry, _ = lax.scan(run_group, carry, (numbers, slices))
    return carry


def _groups_of(span: tuple[int, int], kinds: int) -> Iterator[_Groups]:
    """Yields the whole groups of a span of layers, and the layers that are left."""
    first, stop = span
    while first < stop:
        size = min(kinds, stop - first)
        count = (stop - first) // size
        yield _Groups(first, count, [n % kinds for n in range(first, first + size)])
        first += count * size


def _cut_groups(x: jax.Array, start: int, end: int, size: int) -> jax.Array:
    """Returns layers start to end of x (layers, …) as (groups, size, …).

    Layers alone in their group have no second axis.
    """
    if end - start < len(x):
        x = x[start:end]
    if size == 1:
        return x
    return x.reshape((end - start) // size, size, *x.shape[1:])


def _run_group[Carry](
    step: Callable[[Carry, jax.Array, int, Any], Carry],
    kinds: Sequence[int],
    stack_of_kind: Sequence[int],
    carry: Carry,
    scanned: tuple[Mapping[int, jax.Array], Mapping[int, Any]],
) -> tuple[Carry, None]:
    """Runs the layers of a group, the body of a loop.

    scanned: by stack, the number of the group's first layer in it, and the parameters
      of all of the group's layers in it.
    """
    numbers, slices = scanned
    in_group = Counter(stack_of_kind[kind] for kind in kinds)
    done: Counter[int] = Counter()
    for kind, count in _neighbours_alike(kinds, stack_of_kind):
        stack = stack_of_kind[kind]
        first = done[stack]
        done[stack] += count
        own = slices.get(stack)
        if count > 1:
            own = jax.tree.map(operator.itemgetter(slice(first, first + count)), own)
            layers = numbers[stack] + first + jnp.arange(count, dtype=jnp.int32)
            run_layer = functools.partial(_run_layer, step, kind)
            carry, _ = lax.scan(run_layer, carry, (layers, own))
            continue
        if in_group[stack] > 1:
            own = jax.tree.map(operator.itemgetter(first), own)
        carry = step(carry, numbers[stack] + first, kind, own)
    return carry, None


def _neighbours_alike(
    kinds: Sequence[int], stack_of_kind: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields how many of a group's neighbouring layers are alike, and their kind.

    Layers of the second stack are: a loop over them compiles one in place of all.
    """
    neighbours = itertools.groupby(kinds, stack_of_kind.__getitem__)
    for stack, alike in neighbours:
        if stack:
            yield next(alike), 1 + len(list(alike))
        else:
            yield from ((kind, 1) for kind in alike)


def _run_layer[Carry](
    step: Callable[[Carry, jax.Array, int, Any], Carry],
    kind: int,
    carry: Carry,
    scanned: tuple[jax.Array, Any],
) -> tuple[Carry, None]:
    """Runs a layer of several that are alike, the body of a loop in a group's."""
    number, own = scanned
    return step(carry, number, kind, own), None


@jax.custom_jvp
def _pick(whole: jax.Array, number: jax.Array, own: jax.Array) -> jax.Array:
    """Returns whole[number], on the device; `own` equals it and gets the gradient.

    From the host's memory as it is there: XLA for GPUs cannot reshape it before.
    """
    layer = _to_device(lax.dynamic_slice_in_dim(whole, number, 1))  # (1, …)
    return lax.squeeze(layer, (0,))


@_pick.defjvp
def _pick_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    whole, number, own = primals
    return _pick(whole, number, own), _to_device(tangents[2])


def _is_on_device(x: jax.Array) -> bool:
    return jax.typeof(x).memory_space == jax.memory.Space.Device


def _to_device(x: jax.Array) -> jax.Array:
    return x if _is_on_device(x) else jax.device_put(x, jax.memory.Space.Device)
