"""A KV cache for any stack of decoder layers, filled at once or a few tokens at a time.

The cache is sharded over the ring along its slots. What is written and attended to
there is done by operations that are passed in (`kernels/decode_attention.py`). Nothing
here knows how tokens become embeddings, or what becomes of hidden states.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import Attend
from models.decoder import Decoder
from models.delta import Mix
from models.layers import scan_layers
from models.sizes import DecoderConfig

EMPTY = np.iinfo(np.int32).max
"""Index of no token: of a slot that is free, or of padding among new tokens."""

Stacks = tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]
"""Keys and values; and `Cache.delta`."""


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
        delta=tuple(jnp.zeros(one.shape, one.dtype) for one in delta),
    )


def delta_shapes(
    config: DecoderConfig, rows: int, dtype: jnp.dtype
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of `Cache.delta`; none without Gated DeltaNet."""
    if not (layers := len(config.numbers(is_delta=True))):
        return ()
    keys = config.delta_key_heads, config.delta_key_dim
    values = config.delta_value_heads, config.delta_value_dim
    first, tail = (layers, rows), (config.delta_convolution - 1,)
    like = jax.ShapeDtypeStruct
    state = like((*first, values[0], keys[1], values[1]), jnp.float32)
    return state, *(like((*first, *tail, *x), dtype) for x in (keys, keys, values))


def fill(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    attend: Attend,
    operations: CacheOperations,
    mix: Mix | None = None,
) -> tuple[jax.Array, Cache]:
    """Runs whole rows through the layers and leaves their keys and values in the cache.

    x: (B, T, E), in layout order.
    index: int32 (B, T), in the same order: increasing on each shard, `EMPTY` for
      padding at the end.
    cache: an empty one; T at most S.
    attend: the attention of the rows to themselves. mix: of Gated DeltaNet.

    Returns:
      Hidden states (B, T, E), and the cache.
    """

    def attend_and_keep(q, k, v, stacks, layer, **options):
        stacks = tuple(
            operations.fill(stack, new, layer)
            for stack, new in zip(stacks, (k, v), strict=True)
        )
        return attend(q, k, v, **options), stacks

    taken = index != EMPTY

    def mix_and_keep(qkv, kernels, log_decay, beta, _, stacks, layer):
        # Padding comes last, and leaves the state as it is.
        gates = (jnp.where(taken[..., None], x, 0) for x in (log_decay, beta))
        out, state = mix(qkv, kernels, *gates, index, with_state=True)
        ends = taken.sum(axis=1) - jnp.arange(len(kernels[0]) - 1, 0, -1)[:, None]
        is_tail = (index == ends[..., None])[..., None, None]  # (W - 1, B, T, 1, 1)
        tails = (jnp.where(is_tail, x, 0).sum(axis=2) for x in qkv)
        new = state, *(jnp.swapaxes(x, 0, 1) for x in tails)
        return out, _written(stacks, new, layer)

    run = _through(decoder, x, index, cache, attend_and_keep, mix_and_keep)
    x, ((keys, values), delta) = run
    shards = taken.reshape(*index.shape[:1], *cache.filled.shape, -1)  # (B, N, T / N)
    filled = shards.sum(axis=-1, dtype=jnp.int32).max(axis=0)
    index = operations.fill(cache.index[None], index, 0)[0]
    return x, Cache(keys, values, index, filled, delta)


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
    index: int32 (B, m), of each token in its row, or `EMPTY` for a row that has fewer
      new tokens; a token attends to its row up to its own index.
    cache: where it has no room, tokens are lost. operations: as of `fill`.
    window: tokens that a token sees in every layer, its own included; 0 for all.
    trunk: int32 (B,), first tokens of each row, which m branches share; None: the new
      tokens are a row's next ones. Else they are one of each branch, which attends to
      the trunk and to its own branch. Branch b keeps its index plus b * (S // m) in the
      cache: more tokens than that do not go into it.
    advance: of Gated DeltaNet, (qkv, kernels, log_decay, beta, what is held) -> (out,
      what is held then); then every row has all m tokens.

    The new keys and values go to the member of the ring that has the fewest, in m slots
    from the first that is free. Of these, all are taken up to the last with an index in
    any row: those without one behind it stay free.

    Returns:
      Hidden states (B, m, E), and the cache, in the place of the old one if it is
      donated.
    """
    member = jnp.argmin(cache.filled).astype(jnp.int32)
    slot = cache.filled[member]
    k_end, code = jnp.where(index == EMPTY, 0, index + 1), index
    if trunk is not None:
        tokens, slots = index.shape[1], cache.index.shape[1]
        branch = jnp.arange(tokens, dtype=jnp.int32) * (slots // tokens)
        code, trunk = index + branch, trunk[:, None]
    put = functools.partial(operations.put, member=member, slot=slot)
    indices = put(cache.index[None], code, 0)[0]
    of_run = window

    def keep_and_attend(q, k, v, stacks, layer, window=0, **sinks):
        keys, values = (
            put(x, new, layer) for x, new in zip(stacks, (k, v), strict=True)
        )
        window = min(window or of_run, of_run or window)
        k_start = (k_end - window).clip(0) if window else jnp.zeros_like(k_end)
        visible = k_start, k_end
        if trunk is not None:
            visible = _with_trunk(k_start, k_end, trunk, branch)
        out = operations.attend(q, keys, values, indices, visible, layer, **sinks)
        return out, (keys, values)

    def keep_and_mix(qkv, kernels, log_decay, beta, _, stacks, layer):
        held = tuple(x[layer] for x in stacks)
        out, new = advance(qkv, kernels, log_decay, beta, held)
        return out, _written(stacks, new, layer)

    run = _through(decoder, x, index, cache, keep_and_attend, keep_and_mix)
    x, ((keys, values), delta) = run
    slot = jnp.arange(1, index.shape[1] + 1, dtype=jnp.int32)
    taken = jnp.where(index != EMPTY, slot, 0).max()
    filled = cache.filled.at[member].add(taken)
    return x, Cache(keys, values, indices, filled, delta)


def _with_trunk(
    k_start: jax.Array, k_end: jax.Array, trunk: jax.Array, branch: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the bounds of branches' tokens, (2, B, m): the trunk's, and their own.

    k_start, k_end: (B, m), of a row's next tokens. trunk: (B, 1).
    branch: (m,), what the index of each is shifted by.
    """
    starts = k_start, jnp.maximum(k_start, trunk) + branch
    ends = jnp.minimum(k_end, trunk), k_end + branch
    return jnp.stack(starts), jnp.stack(ends)


def cut(cache: Cache, lengths: jax.Array) -> Cache:
    """Frees the slots of all but the first tokens of each row, with attention alone.

    lengths: int32 (B,), tokens that a row keeps.
    """
    index = jnp.where(cache.index < lengths[:, None], cache.index, EMPTY)
    ring = cache.filled.size
    taken = (index != EMPTY).reshape(len(lengths), ring, -1)  # (B, N, S / N)
    # On every member a row's tokens lie in their order.
    slot = jnp.arange(1, taken.shape[2] + 1, dtype=jnp.int32)
    return cache._replace(
        index=index, filled=jnp.where(taken, slot, 0).max(axis=(0, 2))
    )


def _written(stacks: tuple, new: tuple, layer: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the stacks (Y, …) with what is new of a layer."""
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=layer, axis=0)
    return tuple(write(*pair) for pair in zip(stacks, new, strict=True))


def _through(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    attend: Callable[..., tuple[jax.Array, Any]],
    mix: Callable[..., tuple[jax.Array, Any]],
) -> tuple[jax.Array, Stacks]:
    """Runs all layers and the norm, with the cache's stacks as a carry.

    attend, mix: given the stacks of their kind and the layer's number; return both too.
    """
    own = [x for x in (decoder.layers, decoder.delta_layers) if x is not None]
    structures, parameters = zip(*map(nnx.split, own), strict=True)
    kinds = decoder.kinds(jnp.where(index == EMPTY, 0, index), attend, mix)

    def layer(
        carry: tuple[jax.Array, Stacks], number: jax.Array, kind: int, _: None
    ) -> tuple[jax.Array, Stacks]:
        (x, stacks), (place, attend), stack = carry, kinds[kind], decoder.turns[kind]
        # Not from slices of a group: those would be copied.
        own = jax.tree.map(
            lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False),
            parameters[stack],
        )
        here = functools.partial(attend, stacks=stacks[stack], layer=number)
        x, new = nnx.merge(structures[stack], own).with_cache(x, place, here)
        return x, (*stacks[:stack], new, *stacks[stack + 1 :])

    # Carried, not stacked up from the layers: so it is written where it is.
    carry = x, ((cache.keys, cache.values), cache.delta)
    span = 0, decoder.config.num_layers
    x, stacks = scan_layers(layer, carry, span, decoder.turns)
    return decoder.norm(x), stacks
