"""A KV cache for any stack of decoder layers, filled at once or a few tokens at a time.

The cache is sharded over the ring along its slots. What is written and attended to
there is done by operations that are passed in (`kernels/decode_attention.py`). Nothing
here knows how tokens become embeddings, or what becomes of hidden states.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import Attend
from models.decoder import (
    AttentionInputs,
    Decoder,
    DecoderLayer,
    DeltaInputs,
    in_turn,
)
from models.layers import scan_layers
from models.sizes import DecoderConfig

EMPTY = np.iinfo(np.int32).max
"""Index of no token: of a slot that is free, or of padding among new tokens."""

Stack = tuple[jax.Array, ...]
"""What the layers of a kind keep, (Y, …) each: keys and values, or `Cache.delta`."""


class Stacks(NamedTuple):
    """Stacks of the cache, in the order of `Decoder.stack_of_kind`."""

    attention: Stack
    delta: Stack


class Cache(NamedTuple):
    """Keys and values of the tokens so far, of all layers with attention.

    keys, values: (Y, B, S, K, D), of Y layers in S slots; keys are rotated.
    index: int32 (B, S), of the token in each slot in its own row, or `EMPTY`; see
      `append` for branches.
    filled: int32 (N,), slots of each member of the ring that are taken, in some row.
    delta: of the layers with Gated DeltaNet, the state after a row's last token, (Y, B,
      H, D, V), and what their convolution reads before the next one, (Y, B, W - 1, …).
    """

    keys: jax.Array
    values: jax.Array
    index: jax.Array
    filled: jax.Array
    delta: tuple[jax.Array, ...] = ()


class CacheOperations(Protocol):
    """Operations of a cache on the mesh: `kernels.decode_attention.CachedAttention`."""

    def fill(
        self, stack: jax.Array, new: jax.Array, layer: jax.Array | int
    ) -> jax.Array: ...

    def put(
        self,
        stack: jax.Array,
        new: jax.Array,
        layer: jax.Array | int,
        member: jax.Array,
        slot: jax.Array,
    ) -> jax.Array: ...

    def attend(
        self,
        q: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        index: jax.Array,
        visible: tuple[jax.Array, jax.Array],
        layer: jax.Array,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


def empty_cache(
    shape: tuple[int, int, int, int, int],
    dtype: jnp.dtype,
    ring_size: int,
    delta: tuple[jax.ShapeDtypeStruct, ...] = (),
) -> Cache:
    """Makes a cache of free slots.

    shape: (Y, B, S, K, D): layers, rows, slots, key/value heads, head size.
    delta: of `delta_shapes`.
    """
    rows, slots = shape[1:3]
    return Cache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        index=jnp.full((rows, slots), EMPTY, jnp.int32),
        filled=jnp.zeros(ring_size, jnp.int32),
        delta=tuple(jnp.zeros(shape.shape, shape.dtype) for shape in delta),
    )


def delta_shapes(
    config: DecoderConfig, rows: int, dtype: jnp.dtype
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of `Cache.delta`; none without Gated DeltaNet.

    dtype: of what the convolution reads; states are float32.
    """
    layers = len(config.numbers("delta_layers"))
    if not layers:
        return ()
    depth = config.delta_key_dim
    width = config.delta_value_dim
    heads = config.delta_value_heads
    state = jax.ShapeDtypeStruct((layers, rows, heads, depth, width), jnp.float32)
    tail = (layers, rows, config.delta_convolution - 1)
    keys = jax.ShapeDtypeStruct((*tail, config.delta_key_heads, depth), dtype)
    values = jax.ShapeDtypeStruct((*tail, heads, width), dtype)
    return state, keys, keys, values


def fill(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    attend: Attend,
    operations: CacheOperations,
    mix: Callable[..., tuple[jax.Array, jax.Array]] | None = None,
) -> tuple[jax.Array, Cache]:
    """Runs whole rows through the layers and leaves their keys and values in the cache.

    x: (B, T, E), in layout order.
    index: int32 (B, T), in the same order: increasing on each shard, `EMPTY` for
      padding at the end.
    cache: an empty one; T at most S.
    attend: the attention of the rows to themselves.
    mix: of Gated DeltaNet, see `Mix`; with `with_state` it returns the state too.

    Returns:
      Hidden states (B, T, E), and the cache.
    """

    taken = index != EMPTY

    def attend_and_keep(q, k, v, stack, layer, **options):
        keys = operations.fill(stack[0], k, layer)
        values = operations.fill(stack[1], v, layer)
        return attend(q, k, v, **options), (keys, values)

    def mix_and_keep(qkv, kernels, log_decay, beta, _, stack, layer):
        assert mix is not None
        # Padding comes last, and leaves the state as it is.
        log_decay = jnp.where(taken[..., None], log_decay, 0)
        beta = jnp.where(taken[..., None], beta, 0)
        out, state = mix(qkv, kernels, log_decay, beta, index, with_state=True)
        new = [state]
        # What the convolution reads before a row's next token: the last W - 1.
        ends = taken.sum(axis=1) - jnp.arange(len(kernels[0]) - 1, 0, -1)[:, None]
        is_tail = (index == ends[..., None])[..., None, None]  # (W - 1, B, T, 1, 1)
        for x in qkv:
            tail = jnp.where(is_tail, x, 0).sum(axis=2)  # (W - 1, B, H, D)
            new.append(jnp.swapaxes(tail, 0, 1))
        return out, _written(stack, new, layer)

    keep_mix = mix_and_keep if mix else None
    x, stacks = _through(decoder, x, index, cache, attend_and_keep, keep_mix)
    keys, values = stacks.attention
    shards = taken.reshape(*index.shape[:1], *cache.filled.shape, -1)  # (B, N, T / N)
    # Of the fullest row: the slots behind that are free in all rows, for `append`.
    filled = shards.sum(axis=-1, dtype=jnp.int32).max(axis=0)
    index = operations.fill(cache.index[None], index, 0)[0]
    return x, Cache(keys, values, index, filled, stacks.delta)


def append(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    operations: CacheOperations,
    window: int = 0,
    trunk: jax.Array | None = None,
    advance: Callable | None = None,
) -> tuple[jax.Array, Cache]:
    """Runs a few new tokens of each row through the layers.

    x: (B, m, E).
    index: int32 (B, m), of each token in its row, or `EMPTY` where a row has fewer new
      tokens; a token attends to its row up to its own index.
    cache: where it has no room, tokens are lost. operations: as of `fill`.
    window: tokens that a token sees in every layer, its own included; 0 for all.
    trunk: int32 (B,), first tokens of each row, which m branches share; None: the new
      tokens are a row's next ones. Else they are one of each branch, and attend to the
      trunk and to their own branch. Branch b keeps its index plus b * (S // m) in the
      cache: more tokens than that do not go into it.
    advance: of Gated DeltaNet, (qkv, kernels, log_decay, beta, state and tails) ->
      (out, both after these tokens); then every row has all m tokens.

    The new keys and values go to the member of the ring that has the fewest, in m slots
    from the first that is free; those behind the last index in any row stay free.
    Returns hidden states (B, m, E), and the cache, in the memory of a donated one.
    """
    member = jnp.argmin(cache.filled).astype(jnp.int32)
    slot = cache.filled[member]
    # Rows without a new token see nothing: their results are zeros, and not read.
    k_end = jnp.where(index == EMPTY, 0, index + 1)
    stored = index
    branches = None
    if trunk is not None:
        branch_slots = cache.index.shape[1] // x.shape[1]
        shift = jnp.arange(x.shape[1], dtype=jnp.int32) * branch_slots
        stored = index + shift
        branches = Branches(trunk[:, None], shift)
    put = functools.partial(operations.put, member=member, slot=slot)
    indices = put(cache.index[None], stored, 0)[0]
    run_window = window

    def keep_and_attend(q, k, v, stack, layer, window=0, sinks=None):
        # Written first: new tokens see themselves, and those before them, in the cache.
        keys = put(stack[0], k, layer)
        values = put(stack[1], v, layer)
        # The smaller of the layer's and the run's window, of which 0 is none.
        window = min(window or run_window, run_window or window)
        visible = _visible(k_end, window, branches)
        out = operations.attend(q, keys, values, indices, visible, layer, sinks)
        return out, (keys, values)

    keep_and_mix = advance and functools.partial(_keep_and_mix, advance)
    x, stacks = _through(decoder, x, index, cache, keep_and_attend, keep_and_mix)
    keys, values = stacks.attention
    slot = jnp.arange(1, index.shape[1] + 1, dtype=jnp.int32)
    taken = jnp.where(index != EMPTY, slot, 0).max()
    filled = cache.filled.at[member].add(taken)
    return x, Cache(keys, values, indices, filled, stacks.delta)


def _keep_and_mix(advance, qkv, kernels, log_decay, beta, _, stack, layer):
    """Advances a layer's states by the new tokens; returns results and the stack."""
    before = tuple(x[layer] for x in stack)
    out, new = advance(qkv, kernels, log_decay, beta, before)
    return out, _written(stack, new, layer)


class Branches(NamedTuple):
    """Branches of each row, of which the new tokens are one each.

    trunk: int32 (B, 1), first tokens of a row, which its branches share.
    shift: int32 (m,), added to the index of a branch's own tokens in the cache.
    """

    trunk: jax.Array
    shift: jax.Array


def _visible(
    k_end: jax.Array, window: int, branches: Branches | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the bounds of new tokens; of branches the trunk's, and their own.

    k_end: (B, m), of a row's next tokens. Bounds are (B, m), or (2, B, m).
    """
    k_start = (k_end - window).clip(0) if window else jnp.zeros_like(k_end)
    if branches is None:
        return k_start, k_end
    # Shifted as the indices of the branch's tokens are in the cache: no query of
    # another branch has them in its interval.
    own_start = jnp.maximum(k_start, branches.trunk) + branches.shift
    trunk_end = jnp.minimum(k_end, branches.trunk)
    own_end = k_end + branches.shift
    return jnp.stack([k_start, own_start]), jnp.stack([trunk_end, own_end])


def cut(cache: Cache, lengths: jax.Array) -> Cache:
    """Frees the slots of all but the first tokens of each row, with attention alone.

    lengths: int32 (B,), tokens that a row keeps.
    """
    index = jnp.where(cache.index < lengths[:, None], cache.index, EMPTY)
    ring = cache.filled.size
    taken = (index != EMPTY).reshape(len(lengths), ring, -1)  # (B, N, S / N)
    # On every member a row's tokens lie in their order.
    slot = jnp.arange(1, taken.shape[2] + 1, dtype=jnp.int32)
    filled = jnp.where(taken, slot, 0).max(axis=(0, 2))
    return cache._replace(index=index, filled=filled)


def _written(stack: Stack, new: Sequence[jax.Array], layer: jax.Array) -> Stack:
    """Returns the arrays (Y, …) of a stack with what is new of a layer."""
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
    return tuple(write(old, part) for old, part in zip(stack, new, strict=True))


def _through(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    attend: Callable[..., tuple[jax.Array, Stack]],
    mix: Callable[..., tuple[jax.Array, Stack]] | None,
) -> tuple[jax.Array, Stacks]:
    """Runs all layers and the norm, with the cache's stacks as a carry.

    attend, mix: given the stack of their kind and the layer's number in it, they return
      the new stack too. mix: None without Gated DeltaNet.
    """
    # The cache's slots, and not the new tokens, say how long a row may become: keys of
    # earlier tokens were rotated with the same frequencies.
    slots = cache.index.shape[1]
    positions = jnp.where(index == EMPTY, 0, index)
    inputs = decoder.layer_inputs(positions, attend, mix, slots)
    carry = (x, Stacks((cache.keys, cache.values), cache.delta))
    dense = decoder.config.dense_layers
    if decoder.dense_layers is not None:
        carry = _through_stacks([decoder.dense_layers], carry, inputs, (0, dense))
    layers: list[DecoderLayer] = [decoder.layers]
    if decoder.delta_layers is not None:
        layers.append(decoder.delta_layers)
    span = (dense, decoder.config.num_layers)
    kinds = in_turn(inputs, dense)
    x, stacks = _through_stacks(layers, carry, kinds, span)
    return decoder.norm(x), stacks


def _through_stacks(
    layers: Sequence[DecoderLayer],
    carry: tuple[jax.Array, Stacks],
    inputs: Sequence[AttentionInputs | DeltaInputs],
    span: tuple[int, int],
) -> tuple[jax.Array, Stacks]:
    """Runs the layers of one stack, or of two that take turns, and returns the carry.

    inputs: of each kind, the first of which layer span[0] has.
    span: numbers of the first layer, before which all have attention, and of the one
      behind the last.
    """
    structures, parameters = zip(*map(nnx.split, layers), strict=True)
    stack_of_kind = [int(isinstance(given, DeltaInputs)) for given in inputs]
    first, stop = span

    def step(
        carry: tuple[jax.Array, Stacks], number: jax.Array, kind: int, _: None
    ) -> tuple[jax.Array, Stacks]:
        x, stacks = carry
        stack = stack_of_kind[kind]
        # Not from slices of a group: those would be copied.
        own = jax.tree.map(
            lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False),
            parameters[stack],
        )
        layer = nnx.merge(structures[stack], own)
        in_cache = number + first if first else number
        given = inputs[kind].with_options(stack=stacks[stack], layer=in_cache)
        x, new = layer.with_cache(x, given)
        if isinstance(given, DeltaInputs):
            return x, stacks._replace(delta=new)
        return x, stacks._replace(attention=new)

    # Carried, not stacked up from the layers: so it is written where it is.
    return scan_layers(step, carry, (0, stop - first), stack_of_kind)
