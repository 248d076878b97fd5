"""Losses of the next token, in chunks, and of actions.

The logits of all tokens never exist.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.actions import Actions
from models.memory import Partition, scan_chunks

TOKEN = "batch", "sequence"
FIRST_BOUND, FACTOR = 256, 4
"""Bounds of `Parts.by_position`: 256, 1 Ki, 4 Ki, …"""


@dataclass(frozen=True)
class Parts:
    """Parts of a loss by a token's place: [0, bounds[0]), [bounds[0], bounds[1]), …

    bounds: increasing. names: of the parts, one more than bounds.
    """

    bounds: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def by_position(cls, context_tokens: int, first: int = 0) -> "Parts":
        """Returns parts by the place in a document: does more context help?

        Bounds are at first, 4 first, 16 first, … below `context_tokens`.

        first: 0 for `FIRST_BOUND`.
        """
        bounds, bound = [], first or FIRST_BOUND
        while bound < context_tokens:
            bounds.append(bound)
            bound *= FACTOR
        return cls(tuple(bounds), tuple(f"from_{start}" for start in (0, *bounds)))

    @classmethod
    def by_rank(cls, chain_length: int) -> "Parts":
        """Returns a part for each place of an episode in its chain."""
        ranks = tuple(range(1, chain_length + 1))
        return cls(ranks[:-1], tuple(f"rank_{rank}" for rank in ranks))

    def sums(self, values: jax.Array, places: jax.Array) -> jax.Array:
        """Sums values over the tokens of each part: (parts,).

        values: of any shape. places: int32, of the same, from 0.
        """
        starts = jnp.array((0, *self.bounds), jnp.int32)  # (parts,)
        ends = jnp.array((*self.bounds, jnp.iinfo(jnp.int32).max), jnp.int32)
        place = places[..., None]
        is_in_part = (starts <= place) & (place < ends)  # (…, parts)
        of_part = jnp.where(is_in_part, values[..., None], 0)
        return of_part.reshape(-1, len(starts)).sum(0)


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    by_place: tuple[Parts, jax.Array] | None = None,
    *,
    logits: Callable[[jax.Array, jax.Array], jax.Array],
    chunk: int,
    partition: Partition,
) -> jax.Array:
    """Sums the tokens' weighted negative log-likelihoods, in nats, float32.

    Returns a scalar, or (parts,) with `by_place`.

    hidden: (B, T, E), in the compute type; tokens in any order.
    head: (E, V) float32, from hidden states to logits.
    targets: int32 (B, T). weights: float32 (B, T), 0 where unsupervised.
    by_place: parts to sum apart, and the tokens' places that they go by, int32 (B, T).
    logits: from hidden states (…, E) and head to logits (…, V) float32.
    chunk: tokens per device whose logits exist at a time.

    On every device: one gather of the head, one scatter of its gradient, one sum. The
    vocabulary may be sharded (Megatron's parallel cross-entropy, 1909.08053).
    """
    parts, *places = by_place or (None,)

    def local(
        hidden: jax.Array,
        head: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        *places: jax.Array,
    ) -> jax.Array:
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
        each = scan_chunks(losses, jax.tree.map(partition.vary, tokens), chunk)
        if parts is None:
            sums = each.sum()
        else:
            sums = parts.sums(each, partition.vary(*places).reshape(-1))
        # Each shard of the vocabulary has computed a part of every token's loss.
        return partition.total(sums, (*TOKEN, "vocab"))

    names = (*TOKEN, None), ("embed", "vocab"), TOKEN, TOKEN, *[TOKEN] * len(places)
    call = partition.over_shards(local, names, (None,) * len(places))
    return call(hidden, head, targets, weights, *places)


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
    mine = (target >= 0) & (target < logits.shape[1])
    place = jnp.where(mine, target, 0)[:, None]
    chosen = jnp.take_along_axis(logits, place, axis=1)[:, 0]
    return share * (jnp.log(everywhere) + highest) - jnp.where(mine, chosen, 0)


def action_errors(
    predicted: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    places: jax.Array,
    *,
    actions: Actions,
    parts: Parts,
    partition: Partition,
) -> jax.Array:
    """Sums weighted errors of actions of each part: float32 (parts,).

    predicted: float32 (B, S, P), of steps in any order. targets: (B, S, A).
    weights: float32 (B, S). places: int32 (B, S), what the parts are by.
    """

    def local(
        predicted: jax.Array, targets: jax.Array, weights: jax.Array, places: jax.Array
    ) -> jax.Array:
        errors = actions.errors(predicted, targets)  # (b, s)
        sums = parts.sums(weights * errors, places)
        return partition.total(sums, TOKEN)

    names = (*TOKEN, None), (*TOKEN, None), TOKEN, TOKEN
    call = partition.over_shards(local, names, (None,))
    return call(predicted, targets, weights, places)
