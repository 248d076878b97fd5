"""In-context RL: a decoder that reads whole episodes and predicts actions.

The Agentic Transformer (2305.16554) reads several episodes of a task, one after the
other; with one episode it is a Decision Transformer (2106.01345). Every step of the
environment is four tokens: the return that is left to reach, the state, the action, and
the reward with the mark of an episode that reached its target. What is continuous stays
so. The hidden state of the state's token gives the action. Or a step is one token, of
all that is known before the action: the sum of the same four, with action and reward of
the step before. Decision-Pretrained Transformers (2306.14892) read transitions in this
way, which takes a quarter of the tokens.

Letters: B batch, S steps (in any order: their positions come with them), M tokens of a
step (4 or 1), T = M S tokens, E hidden size, A action size, P numbers predicted of a
step. The steps are sharded: each device makes the tokens of its own, so that no
sequence is gathered, and no token is apart from its step.
"""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from models import cache as caches
from models.actions import BINS, KINDS, Actions
from models.attention import Attend
from models.cache import EMPTY, Cache, CacheOperations
from models.chunks import scan_chunks
from models.decoder import Decoder
from models.layers import INITIAL_STDDEV, matrix
from models.memory import Execution, Partition
from models.sizes import DecoderConfig

PARTS_OF_A_STEP = 4
"""Return, state, action, reward: a token each, or all in one."""
STEP_TOKENS = (PARTS_OF_A_STEP, 1)
STATE, ACTION = 1, 2
"""Token indices of the state and the action in a step of four."""

STEP = ("batch", "sequence")


class Steps(Protocol):
    """Arrays that a model reads of the steps; `data.agents.chains.ChainBatch` has more.

    returns_to_go, rewards, completions: float32 (B, S). observations: float32 (B, S,
    observation size), standardised. actions: float32 (B, S, A). timesteps, positions:
    int32 (B, S), numbers of a step in its episode and in the chain.
    """

    returns_to_go: jax.Array
    observations: jax.Array
    actions: jax.Array
    rewards: jax.Array
    completions: jax.Array
    timesteps: jax.Array
    positions: jax.Array


@dataclass(frozen=True)
class AgentConfig(DecoderConfig):
    """Sizes of a model.

    episode_steps: most steps of an episode. chain_length: episodes in a context.
    return_scale: returns are divided by it.
    step_tokens: tokens of a step: 4, or 1 of all that is known before the action.
    action_kind, action_bins: see `Actions`.
    reads_returns: whether the return that is left to reach is read, or 0.
    """

    observation_size: int = field(kw_only=True)
    action_size: int = field(kw_only=True)
    episode_steps: int = field(kw_only=True)
    chain_length: int = field(kw_only=True)
    return_scale: float = field(kw_only=True)
    step_tokens: int = field(default=PARTS_OF_A_STEP, kw_only=True)
    action_kind: str = field(default=KINDS[0], kw_only=True)
    action_bins: int = field(default=BINS, kw_only=True)
    reads_returns: bool = field(default=True, kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_step_tokens(self.step_tokens)
        if not self.return_scale > 0:
            raise ValueError(f"return_scale={self.return_scale} must be above 0")
        _ = self.actions  # are checked

    @property
    def actions(self) -> Actions:
        """The kind of actions."""
        return Actions(self.action_kind, self.action_size, self.action_bins)


def check_step_tokens(step_tokens: int) -> None:
    """Raises ValueError if a step cannot have this number of tokens."""
    if step_tokens not in STEP_TOKENS:
        raise ValueError(f"{step_tokens=} must be 4, or 1 of a whole step")


class LayerNorm(nnx.Module):
    """Layer normalisation (1607.06450)."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size, jnp.float32), axes=(None,))
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), axes=(None,))
        self.epsilon = epsilon


def _normalise(
    x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> jax.Array:
    x = x - x.mean(axis=-1, keepdims=True)
    variance = jnp.square(x).mean(axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + epsilon) * scale + bias


class StepWeights(NamedTuple):
    """A device's parameters of what comes before the layers.

    returns, observations, actions, outcomes: (numbers of the part, E), embeddings of a
      step's four parts; outcomes are reward and completion.
    modalities: (4, E), added to the parts. timesteps: (steps of an episode, E).
    scale, bias: (E,), of the norm.
    """

    returns: jax.Array
    observations: jax.Array
    actions: jax.Array
    outcomes: jax.Array
    modalities: jax.Array
    timesteps: jax.Array
    scale: jax.Array
    bias: jax.Array


class Agent(Decoder[AgentConfig]):
    """Decoder from steps to the actions to take in them.

    What comes before and after the layers is small, and every device has all of it.
    """

    def __init__(
        self,
        config: AgentConfig,
        execution: Execution,
        partition: Partition,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, execution, partition, rngs=rngs)
        embed = config.hidden_size

        def table(rows: int, stddev: float = INITIAL_STDDEV) -> nnx.Param:
            return matrix(rngs, (rows, embed), (None, None), stddev)

        def linear(size: int) -> nnx.Param:
            return table(size, size**-0.5)

        self.return_embedding = linear(1)
        self.observation_embedding = linear(config.observation_size)
        self.action_embedding = linear(config.action_size)
        self.reward_embedding = linear(2)

        # One row for each of the four: also the bias of its embedding.
        self.modality_embedding = table(PARTS_OF_A_STEP)
        self.timestep_embedding = table(config.episode_steps)
        self.embedding_norm = LayerNorm(embed, config.norm_epsilon)
        head = (embed, config.actions.predicted_size)
        self.action_head = matrix(rngs, head, (None, None), INITIAL_STDDEV)
        bias = jnp.zeros(head[1:], jnp.float32)
        self.action_bias = nnx.Param(bias, axes=(None,))

    def __call__(self, steps: Steps, attend: Attend) -> jax.Array:
        """Predicts actions in [-1, 1], or their logits, float32 (B, S, P).

        attend: causal, in the order of the steps' tokens (see `token_index`).
        """
        index = self.token_index(steps.positions)
        hidden = self.through_layers(self.embed(steps), index, attend).x
        return self.actions(hidden)

    def token_index(self, positions: jax.Array) -> jax.Array:
        """Returns indices of tokens in the chain, int32 (B, T), from those of steps."""

        tokens = self.config.step_tokens

        def local(positions: jax.Array) -> jax.Array:
            number = jnp.arange(tokens, dtype=jnp.int32)  # of a token in its step
            index = tokens * positions[..., None] + number
            return index.reshape(len(positions), -1)  # (B, M S)

        return self.partition.over_shards(local, [STEP], STEP)(positions)

    def embed(self, steps: Steps) -> jax.Array:
        """Embeds the steps' tokens, (B, T, E) in the compute type."""
        scale = self.config.return_scale if self.config.reads_returns else jnp.inf
        arrays = (
            steps.returns_to_go / scale,
            steps.observations,
            steps.actions,
            jnp.stack([steps.rewards, steps.completions], axis=-1),
            steps.timesteps,
        )
        norm = self.embedding_norm
        parameters = (
            self.return_embedding,
            self.observation_embedding,
            self.action_embedding,
            self.reward_embedding,
            self.modality_embedding,
            self.timestep_embedding,
            norm.scale,
            norm.bias,
        )
        names = [STEP + (None,) * (x.ndim - 2) for x in arrays]
        names += [parameter.axes for parameter in parameters]
        call = self.partition.over_shards(self._embed_shard, names, (*STEP, None))
        return call(*arrays, *(parameter[...] for parameter in parameters))

    def _embed_shard(self, *shards: jax.Array) -> jax.Array:
        """Embeds a device's steps: (b, t, E), in the compute type.

        shards: of the five arrays of `embed`, then of its parameters, in their order.
        """
        partition = self.partition
        shards = tuple(partition.vary(shard) for shard in shards)
        returns_to_go = shards[0]  # (b, s)
        steps = tuple(x.reshape(-1, *x.shape[2:]) for x in shards[:5])  # (b · s, …)
        weights = StepWeights(*shards[5:])
        chunk = self.execution.feed_forward_chunk // self.config.step_tokens
        embed_steps = functools.partial(self._embed_steps, weights)
        x = scan_chunks(embed_steps, steps, chunk or len(steps[0]))
        x = x.reshape(len(returns_to_go), -1, x.shape[-1])
        return partition.total(x, ("heads",))

    def _embed_steps(
        self, weights: StepWeights, steps: tuple[jax.Array, ...]
    ) -> jax.Array:
        """Embeds the tokens of a chunk of steps: (steps, M, E)."""
        returns_to_go, observations, actions, outcomes, timesteps = steps
        parts = [
            returns_to_go[:, None] @ weights.returns,
            observations @ weights.observations,
            actions @ weights.actions,
            outcomes @ weights.outcomes,
        ]
        x = jnp.stack(parts, axis=1)  # (steps, 4, E)
        x += weights.modalities
        if self.config.step_tokens == 1:
            x = x.sum(axis=1, keepdims=True)
        x += jnp.take(weights.timesteps, timesteps, axis=0, mode="clip")[:, None]
        x = _normalise(x, weights.scale, weights.bias, self.embedding_norm.epsilon)
        # What varies is summed over the shards of the heads in `_embed_shard`.
        x = x / self.partition.shards("heads")
        return x.astype(self.execution.compute_dtype)

    def actions(self, hidden: jax.Array) -> jax.Array:
        """Maps hidden states (B, T, E) to what is predicted, float32 (B, S, P)."""
        tokens = self.config.step_tokens
        actions = self.config.actions

        def local(hidden: jax.Array, head: jax.Array, bias: jax.Array) -> jax.Array:
            rows, _, embed = hidden.shape
            steps = hidden.reshape(rows, -1, tokens, embed)
            states = steps[:, :, min(STATE, tokens - 1)]  # (B, S, E)
            return actions.bounded(states.astype(jnp.float32) @ head + bias)

        names = (*STEP, None), self.action_head.axes, self.action_bias.axes
        call = self.partition.over_shards(local, names, (*STEP, None))
        return call(hidden, self.action_head[...], self.action_bias[...])


def read(
    agent: Agent,
    steps: Steps,
    count: jax.Array,
    cache: Cache,
    attend: Attend,
    operations: CacheOperations,
) -> Cache:
    """Returns an empty cache filled with steps (B, S), which are over, for `act`.

    steps: in layout order. count: int32 (B,), of each row's without padding.
    attend: attention of the tokens to themselves, under `visible`.
    """
    tokens = agent.config.step_tokens
    # What came of the last step comes with the next one.
    known = tokens * count[:, None] - (tokens - ACTION if tokens > 1 else 0)
    index = agent.token_index(steps.positions)
    real = index < known
    # Bounds may not fall: padding sees all that is real, and is not kept.
    bound = jnp.minimum(index + 1, known)
    attend = functools.partial(attend, visible=(jnp.zeros_like(bound), bound))
    index = jnp.where(real, index, EMPTY)
    _, cache = caches.fill(agent, agent.embed(steps), index, cache, attend, operations)
    return cache


def act(
    agent: Agent, steps: Steps, cache: Cache, operations: CacheOperations
) -> tuple[jax.Array, Cache]:
    """Returns what is predicted of each row, float32 (B, P), and the new cache.

    agent: in a `StationaryPartition`.
    steps: the step before, with its action, reward and completion, and the present one,
      whose action and reward are not read: (B, 2) each. At a row's first step the one
      before has position -1; in a row that waits both have. Where a step is one token,
      the present one alone, which has the action and reward of the one before: (B, 1).
    cache: of all tokens up to the state of the step before; gets those up to the
      present one.
    """
    tokens = agent.config.step_tokens
    new = slice(ACTION, ACTION + tokens) if tokens > 1 else slice(None)
    index = agent.token_index(steps.positions)[:, new]
    index = jnp.where(index < 0, EMPTY, index)
    x = agent.embed(steps)[:, new]
    hidden, cache = caches.append(agent, x, index, cache, operations)
    state = jnp.repeat(hidden[:, -1:], tokens, axis=1)  # the present one
    return agent.actions(state)[:, 0], cache
