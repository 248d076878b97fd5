"""Losses of the next token, in chunks, and of actions.

The logits of all tokens never exist.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.actions import Actions
from models.chunks import scan_chunks
from models.execution import Partition
from models.logits import PLAIN, Logits

TOKEN = "batch", "sequence"
FIRST_BOUND, FACTOR = 256, 4
"""Bounds of `PositionParts.within`: 256, 1 Ki, 4 Ki, …"""


@dataclass(frozen=True)
class PositionParts:
    """Parts of a loss by a token's position in its document: does more context help?

    bounds: positions, increasing. Parts are [0, bounds[0]), [bounds[0], bounds[1]), …
    """

    bounds: tuple[int, ...]

    @classmethod
    def within(cls, context_tokens: int, first: int = FIRST_BOUND) -> "PositionParts":
        """Returns bounds at first, 4 first, 16 first, … below `context_tokens`."""
        bounds, bound = [], first
        while bound < context_tokens:
            bounds.append(bound)
            bound *= FACTOR
        return cls(tuple(bounds))

    @property
    def names(self) -> list[str]:
        """Names of the parts."""
        return [f"from_{start}" for start in (0, *self.bounds)]

    def sums(self, values: jax.Array, positions: jax.Array) -> jax.Array:
        """Sums values over the tokens of each part: (parts,).

        values: of any shape. positions: int32, of the same.
        """
        starts = jnp.array((0, *self.bounds), jnp.int32)  # (parts,)
        ends = jnp.array((*self.bounds, jnp.iinfo(jnp.int32).max), jnp.int32)
        place = positions[..., None]
        is_in_part = (starts <= place) & (place < ends)  # (…, parts)
        of_part = jnp.where(is_in_part, values[..., None], 0)
        return of_part.reshape(-1, len(starts)).sum(0)


def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    logits: Logits = PLAIN,
    chunk: int,
    partition: Partition,
) -> jax.Array:
    """Sums the tokens' weighted negative log-likelihoods, in nats: float32 scalar.

    As `cross_entropy_by_position`, but of all of them.
    """

    def local(*arrays: jax.Array) -> jax.Array:
        losses = _local_losses(*arrays, logits=logits, chunk=chunk, partition=partition)
        loss = losses.sum()
        # Each shard of the vocabulary has computed a part of every token's loss.
        return partition.total(loss, (*TOKEN, "vocab"))

    names = (*TOKEN, None), ("embed", "vocab"), TOKEN, TOKEN
    return partition.over_shards(local, names, ())(hidden, head, targets, weights)


def cross_entropy_by_position(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    positions: jax.Array,
    *,
    parts: PositionParts,
    logits: Logits = PLAIN,
    chunk: int,
    partition: Partition,
) -> jax.Array:
    """Sums weighted negative log-likelihoods of the tokens in each part: (parts,).

    hidden: (B, T, E), in the compute type; tokens in any order.
    head: (E, V) float32, from hidden states to logits.
    targets: int32 (B, T). weights: float32 (B, T), 0 where unsupervised.
    positions: int32 (B, T), of each token in its document.
    logits: what makes logits of hidden states and head.
    chunk: tokens per device whose logits exist at a time.

    On every device: one gather of the head, one scatter of its gradient, one sum. The
    vocabulary may be sharded (Megatron's parallel cross-entropy, 1909.08053).
    """

    def local(*arrays: jax.Array) -> jax.Array:
        *arrays, positions = arrays
        losses = _local_losses(*arrays, logits=logits, chunk=chunk, partition=partition)
        positions = partition.vary(positions).reshape(-1)
        return partition.total(parts.sums(losses, positions), (*TOKEN, "vocab"))

    names = (*TOKEN, None), ("embed", "vocab"), TOKEN, TOKEN, TOKEN
    call = partition.over_shards(local, names, (None,))
    return call(hidden, head, targets, weights, positions)


def _local_losses(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    logits: Logits,
    chunk: int,
    partition: Partition,
) -> jax.Array:
    """Returns this device's part of its tokens' weighted losses, (tokens,).

    Arguments as in `cross_entropy_by_position`, but only what a device holds of them.
    """
    size = hidden.shape[-1]
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
    mine = (target >= 0) & (target < logits.shape[1])
    place = jnp.where(mine, target, 0)[:, None]
    chosen = jnp.take_along_axis(logits, place, axis=1)[:, 0]
    return share * (jnp.log(everywhere) + highest) - jnp.where(mine, chosen, 0)


@dataclass(frozen=True)
class RankParts:
    """Parts of a loss by the episode's place in its chain, from 0.

    chain_length: how many.
    """

    chain_length: int

    @property
    def names(self) -> list[str]:
        """Names of the parts."""
        return [f"rank_{rank}" for rank in range(1, self.chain_length + 1)]

    def sums(self, values: jax.Array, ranks: jax.Array) -> jax.Array:
        """Sums values over the steps of each rank: (chain_length,).

        values: of any shape. ranks: int32, of the same.
        """
        of_rank = ranks[..., None] == jnp.arange(self.chain_length, dtype=jnp.int32)
        of_part = jnp.where(of_rank, values[..., None], 0)
        return of_part.reshape(-1, self.chain_length).sum(0)


def action_errors(
    predicted: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    places: jax.Array,
    *,
    actions: Actions,
    parts: RankParts | PositionParts,
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
        return partition.total(sums, ("batch", "sequence"))

    step = ("batch", "sequence")
    names = (*step, None), (*step, None), step, step
    call = partition.over_shards(local, names, (None,))
    return call(predicted, targets, weights, places)
