"""Losses of the next token, in chunks, and of actions.

The logits of all tokens never exist.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.actions import Actions
from models.chunks import scan_chunks
from models.memory import Partition

TOKEN = "batch", "sequence"
FIRST_BOUND, FACTOR = 256, 4
"""Bounds of `Parts.by_position`: 256, 1 Ki, 4 Ki, …"""


@dataclass(frozen=True)
class Parts:
    """Parts of a loss by a token's ordinal: [0, bounds[0]), [bounds[0], bounds[1]), …

    An ordinal is a position in a document, or the rank of an episode in its chain.

    bounds: increasing. names: of the parts, one more than bounds.
    """

    bounds: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def by_position(cls, context_tokens: int, first: int = 0) -> "Parts":
        """Returns parts by the position in a document: does more context help?

        Bounds are at first, 4 first, 16 first, … below `context_tokens`.

        first: 0 for `FIRST_BOUND`.
        """
        bounds = []
        bound = first or FIRST_BOUND
        while bound < context_tokens:
            bounds.append(bound)
            bound *= FACTOR
        names = [f"from_{start}" for start in (0, *bounds)]
        return cls(tuple(bounds), tuple(names))

    @classmethod
    def by_rank(cls, chain_length: int) -> "Parts":
        """Returns a part for each rank of an episode in its chain."""
        ranks = tuple(range(1, chain_length + 1))
        names = [f"rank_{rank}" for rank in ranks]
        return cls(ranks[:-1], tuple(names))

    def sums(self, values: jax.Array, ordinals: jax.Array) -> jax.Array:
        """Sums values over the tokens of each part: (parts,).

        values: of any shape. ordinals: int32, of the same, from 0.
        """
        starts = jnp.array((0, *self.bounds), jnp.int32)  # (parts,)
        ends = jnp.array((*self.bounds, jnp.iinfo(jnp.int32).max), jnp.int32)
        ordinals = ordinals[..., None]
        is_in_part = (starts <= ordinals) & (ordinals < ends)  # (…, parts)
        of_part = jnp.where(is_in_part, values[..., None], 0)
        return of_part.reshape(-1, len(starts)).sum(0)


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    by_ordinal: tuple[Parts, jax.Array] | None = None,
    *,
    logits: Callable[[jax.Array, jax.Array], jax.Array],
    chunk: int,
    partition: Partition,
) -> jax.Array:
    """Sums the tokens' weighted negative log-likelihoods, in nats, float32.

    Returns a scalar, or (parts,) with `by_ordinal`.

    hidden: (B, T, E), in the compute type; tokens in any order.
    head: (E, V) float32, from hidden states to logits.
    targets: int32 (B, T). weights: float32 (B, T), 0 where unsupervised.
    by_ordinal: parts to sum apart, and the ordinals of tokens, int32 (B, T).
    logits: from hidden states (…, E) and head to logits (…, V) float32.
    chunk: tokens per device whose logits exist at a time.

    On every device: one gather of the head, one scatter of its gradient, one sum. The
    vocabulary may be sharded (Megatron's parallel cross-entropy, 1909.08053).
    """
    parts, ordinals = by_ordinal or (None, None)

    def local(
        hidden: jax.Array,
        head: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        ordinals: jax.Array | None = None,
    ) -> jax.Array:
        losses = _shard_losses(
            hidden,
            head,
            targets,
            weights,
            logits=logits,
            chunk=chunk,
            partition=partition,
        )
        if parts is None or ordinals is None:
            sums = losses.sum()
        else:
            sums = parts.sums(losses, partition.vary(ordinals).reshape(-1))
        # Each shard of the vocabulary has computed a part of every token's loss.
        return partition.total(sums, (*TOKEN, "vocab"))

    names = [(*TOKEN, None), ("embed", "vocab"), TOKEN, TOKEN]
    if ordinals is None:
        call = partition.over_shards(local, names, ())
        return call(hidden, head, targets, weights)
    call = partition.over_shards(local, [*names, TOKEN], (None,))
    return call(hidden, head, targets, weights, ordinals)


def _shard_losses(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    logits: Callable[[jax.Array, jax.Array], jax.Array],
    chunk: int,
    partition: Partition,
) -> jax.Array:
    """Returns the weighted losses of a device's tokens, (tokens,), inside a shard.

    With a sharded vocabulary its shard's parts of them; arguments as of
    `cross_entropy`, the device's shards.
    """
    size = hidden.shape[-1]
    # The backward goes on when the head's whole gradient is gone.
    hidden, head = jax.lax.optimization_barrier((hidden, head))
    head = partition.gather(head, 0, size, hidden.dtype)  # (E, V / shards)
    hidden = partition.vary(hidden).reshape(-1, size)  # (tokens, E)
    first = partition.shard_number("vocab") * head.shape[1]

    def losses(tokens: tuple[jax.Array, ...]) -> jax.Array:
        x, target, weight = tokens
        z = logits(x, head)  # (tokens, V / shards)
        return weight * _negative_log_likelihood(z, target - first, partition)

    tokens = hidden, targets.reshape(-1), weights.reshape(-1)
    return scan_chunks(losses, jax.tree.map(partition.vary, tokens), chunk)


def _negative_log_likelihood(
    logits: jax.Array, target: jax.Array, partition: Partition
) -> jax.Array:
    """Returns this vocabulary shard's part of each token's loss, (tokens,).

    The parts add up to the loss.

    logits: (tokens, V / shards). target: its index in this shard, out of range if the
    token is another shard's.
    """
    highest = partition.vary(partition.largest(logits.max(axis=-1), "vocab"))
    sums = jnp.exp(logits - highest[:, None]).sum(axis=-1)  # (tokens,)
    everywhere = partition.vary(partition.total(sums, ("vocab",)))
    share = 1 / partition.shards("vocab")
    is_here = (target >= 0) & (target < logits.shape[1])
    column = jnp.where(is_here, target, 0)[:, None]
    chosen = jnp.take_along_axis(logits, column, axis=1)[:, 0]
    return share * (jnp.log(everywhere) + highest) - jnp.where(is_here, chosen, 0)


def action_errors(
    predicted: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    ordinals: jax.Array,
    *,
    actions: Actions,
    parts: Parts,
    partition: Partition,
) -> jax.Array:
    """Sums weighted errors of actions of each part: float32 (parts,).

    predicted: float32 (B, S, P), of steps in any order. targets: (B, S, A).
    weights: float32 (B, S). ordinals: int32 (B, S), of the steps, for the parts.
    """

    def local(
        predicted: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        ordinals: jax.Array,
    ) -> jax.Array:
        errors = actions.errors(predicted, targets)  # (b, s)
        sums = parts.sums(weights * errors, ordinals)
        return partition.total(sums, TOKEN)

    names = (*TOKEN, None), (*TOKEN, None), TOKEN, TOKEN
    call = partition.over_shards(local, names, (None,))
    return call(predicted, targets, weights, ordinals)
