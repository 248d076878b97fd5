"""A KV cache for any stack of decoder layers, filled at once or a few tokens at a time.

The cache is sharded over the ring along its slots. What is written and attended to
there is done by operations that are passed in (`kernels/decode_attention.py`). Nothing
here knows how tokens become embeddings, or what becomes of hidden states.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import Attend
from models.decoder import Decoder
from models.layers import scan_layers

EMPTY = np.iinfo(np.int32).max
"""Index of no token: of a slot that is free, or of padding among new tokens."""

Stacks = tuple[jax.Array, jax.Array]


class Cache(NamedTuple):
    """Keys and values of the tokens so far, of all layers.

    keys, values: (Y, B, S, K, D), of Y layers in S slots; keys are rotated.
    index: int32 (B, S), of the token in each slot in its own row, or `EMPTY`; see
      `append` for branches.
    filled: int32 (N,), slots of each member of the ring that are taken, in some row.
    """

    keys: jax.Array
    values: jax.Array
    index: jax.Array
    filled: jax.Array


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
    shape: tuple[int, int, int, int, int], dtype: jnp.dtype, ring_size: int
) -> Cache:
    """Makes a cache of free slots.

    shape: (Y, B, S, K, D): layers, rows, slots, key/value heads, head size.

    Raises:
      ValueError: the slots do not divide over the ring, or a size is below 1.
    """
    rows, slots = shape[1:3]
    if min(*shape, ring_size) < 1 or slots % ring_size:
        raise ValueError(
            f"sizes of a cache must be at least 1, and its slots divide over the ring "
            f"of {ring_size}, got {shape} (layers, rows, slots, heads, head size)"
        )
    return Cache(
        keys=jnp.zeros(shape, dtype),
        values=jnp.zeros(shape, dtype),
        index=jnp.full((rows, slots), EMPTY, jnp.int32),
        filled=jnp.zeros(ring_size, jnp.int32),
    )


def fill(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    attend: Attend,
    operations: CacheOperations,
) -> tuple[jax.Array, Cache]:
    """Runs whole rows through the layers and leaves their keys and values in the cache.

    x: (B, T, E), in layout order.
    index: int32 (B, T), in the same order: increasing on each shard, `EMPTY` for
      padding at the end.
    cache: an empty one; T at most S.
    attend: the attention of the rows to themselves.

    Returns:
      Hidden states (B, T, E), and the cache.

    Raises:
      ValueError: the index is not one of each token.
    """
    _check_index(x, index)

    def attend_and_keep(q, k, v, stacks, layer, **options):
        stacks = tuple(
            operations.fill(stack, new, layer)
            for stack, new in zip(stacks, (k, v), strict=True)
        )
        return attend(q, k, v, **options), stacks

    x, (keys, values) = _through(decoder, x, index, cache, attend_and_keep)
    taken = index != EMPTY
    shards = taken.reshape(*index.shape[:1], *cache.filled.shape, -1)  # (B, N, T / N)
    filled = shards.sum(axis=-1, dtype=jnp.int32).max(axis=0)
    index = operations.fill(cache.index[None], index, 0)[0]
    return x, Cache(keys, values, index, filled)


def append(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    operations: CacheOperations,
    window: int = 0,
    trunk: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    """Runs a few new tokens of each row through the layers.

    x: (B, m, E).
    index: int32 (B, m), of each token in its row, or `EMPTY` for a row that has fewer
      new tokens; a token attends to its row up to its own index.
    cache: where it has no room, tokens are lost.
    window: tokens that a token sees in every layer, its own included; 0 for all.
    trunk: int32 (B,), first tokens of each row, which m branches share; None: the new
      tokens are a row's next ones. Else they are one of each branch, which attends to
      the trunk and to its own branch. Branch b keeps its index plus b * (S // m) in the
      cache: more tokens than that do not go into it.

    The new keys and values go to the member of the ring that has the fewest, in m slots
    from the first that is free. Of these, all are taken up to the last with an index in
    any row: those without one behind it stay free.

    Returns:
      Hidden states (B, m, E), and the cache, in the place of the old one if it is
      donated.

    Raises:
      ValueError: the index is not one of each token.
    """
    _check_index(x, index)
    member = jnp.argmin(cache.filled).astype(jnp.int32)
    slot = cache.filled[member]
    k_end, code = jnp.where(index == EMPTY, 0, index + 1), index
    if trunk is not None:
        tokens, slots = index.shape[1], cache.index.shape[1]
        branch = jnp.arange(tokens, dtype=jnp.int32) * (slots // tokens)
        code, trunk = index + branch, trunk[:, None]
    indices = operations.put(cache.index[None], code, 0, member, slot)[0]
    of_run = window

    def keep_and_attend(q, k, v, stacks, layer, window=0, **sinks):
        keys, values = (
            operations.put(stack, new, layer, member, slot)
            for stack, new in zip(stacks, (k, v), strict=True)
        )
        window = min(window or of_run, of_run or window)
        k_start = (k_end - window).clip(0) if window else jnp.zeros_like(k_end)
        visible = k_start, k_end
        if trunk is not None:
            starts = k_start, jnp.maximum(k_start, trunk) + branch
            ends = jnp.minimum(k_end, trunk), k_end + branch
            visible = jnp.stack(starts), jnp.stack(ends)  # (2, B, m)
        out = operations.attend(q, keys, values, indices, visible, layer, **sinks)
        return out, (keys, values)

    x, (keys, values) = _through(decoder, x, index, cache, keep_and_attend)
    slot = jnp.arange(1, index.shape[1] + 1, dtype=jnp.int32)
    taken = jnp.where(index != EMPTY, slot, 0).max()
    filled = cache.filled.at[member].add(taken)
    return x, Cache(keys, values, indices, filled)


def cut(cache: Cache, lengths: jax.Array) -> Cache:
    """Frees the slots of all but the first tokens of each row.

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


def _check_index(x: jax.Array, index: jax.Array) -> None:
    if index.shape != x.shape[:2] or index.dtype != jnp.int32:
        raise ValueError(
            f"index must be int32 {x.shape[:2]}, one of each token, got {index.dtype} "
            f"{index.shape}"
        )


def _through(
    decoder: Decoder,
    x: jax.Array,
    index: jax.Array,
    cache: Cache,
    attend: Callable[..., tuple[jax.Array, Stacks]],
) -> tuple[jax.Array, Stacks]:
    """Runs all layers and the norm, with the cache's stacks as a carry."""
    structure, parameters = nnx.split(decoder.layers)
    kinds = decoder.kinds(jnp.where(index == EMPTY, 0, index), attend)

    def layer(
        carry: tuple[jax.Array, Stacks], number: jax.Array, kind: int, _: None
    ) -> tuple[jax.Array, Stacks]:
        (x, stacks), (rotation, attend) = carry, kinds[kind]
        # Not from slices of a group: those would be copied.
        own = jax.tree.map(
            lambda w: jax.lax.dynamic_index_in_dim(w, number, keepdims=False),
            parameters,
        )

        def attend_here(q: jax.Array, k: jax.Array, v: jax.Array, **sinks: jax.Array):
            return attend(q, k, v, stacks, number, **sinks)

        return nnx.merge(structure, own).with_cache(x, rotation, attend_here)

    # Carried, not stacked up from the layers: so it is written where it is.
    carry, layers = (x, (cache.keys, cache.values)), cache.keys.shape[0]
    x, stacks = scan_layers(layer, carry, (0, layers), len(kinds))
    return decoder.norm(x), stacks
