"""From a config of task "exorl" to what acts: its programs, and an agent at work."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from data.chains import STD_FLOOR, ChainBatch
from data.trajectory_file import TrajectoryFile
from kernels.decode_attention import CachedAttention
from models import agentic
from models.agentic import TOKENS_OF_A_STEP
from models.cache import Cache, empty_cache
from tasks import base, exorl
from tasks.generation import cache_shardings
from tools.lib.exorl.scenes import Scene
from training.mesh import Partition, StationaryPartition


class Actor(Protocol):
    """Chooses actions, for E rows at a time."""

    def forget(self) -> None:
        """Begins an empty context."""

    def act(self, present: ChainBatch) -> np.ndarray:
        """Returns actions, float32 (E, A), for the present steps, (E,) each.

        Of these, the action and what comes of it are not looked at.
        """

    def learn(self, done: ChainBatch) -> None:
        """Takes the present steps with what was done and what came of it."""


@dataclass
class CloningActor:
    """Sees the present alone. program: from observations (E, 1, …) to actions."""

    program: Callable[[jax.Array], jax.Array]

    def forget(self) -> None:
        """Has nothing to forget."""

    def act(self, present: ChainBatch) -> np.ndarray:
        return np.asarray(self.program(present.observations[:, None]))[:, 0]

    def learn(self, done: ChainBatch) -> None:
        """Does not learn."""


@dataclass
class ContextActor:
    """Sees all since it last forgot, through a KV cache that is sharded over the ring.

    empty: () -> cache. program: (steps (E, 2), cache) -> (actions (E, A), cache), see
    `agentic.act`; takes the cache's place.
    """

    empty: Callable[[], Cache]
    program: Callable[[ChainBatch, Cache], tuple[jax.Array, Cache]]
    _cache: Cache | None = None
    _before: ChainBatch | None = None
    _position: int = 0

    def forget(self) -> None:
        self._cache, self._before, self._position = self.empty(), None, 0

    def act(self, present: ChainBatch) -> np.ndarray:
        before = present if self._before is None else self._before
        pairs = zip(before, present, strict=True)
        steps = ChainBatch(*(np.stack(pair, axis=1) for pair in pairs))
        places = np.array([self._position - 1, self._position], np.int32)
        positions = np.broadcast_to(places, steps.positions.shape)
        steps = steps._replace(positions=positions)
        actions, self._cache = self.program(steps, self._cache)
        return np.asarray(actions)

    def learn(self, done: ChainBatch) -> None:
        self._before = done
        self._position += 1


def actor(
    config: ml_collections.ConfigDict,
    partition: Partition,
    parameters: Any,
    *,
    rows: int,
    episodes: int,
) -> Actor:
    """Returns the config's agent with its parameters, for E rows.

    episodes: that a context has to hold.

    Raises:
      ValueError: rows or heads do not divide over the mesh.
    """
    few_steps = StationaryPartition(partition.mesh)
    model = exorl.model(config, few_steps)
    if config.agent.method == "perceptron":
        program = jax.jit(lambda p, x: nnx.merge(model.structure, p)(x))
        return CloningActor(functools.partial(program, parameters))
    ring, sizes = partition.shards("sequence"), config.model
    # Every step puts its tokens at one member of the ring.
    steps = -(-episodes * config.agent.episode_steps // ring) * ring
    slots = TOKENS_OF_A_STEP * steps
    shape = sizes.num_layers, rows, slots, sizes.num_kv_heads, sizes.head_dim
    cache = cache_shardings(partition, shape)
    ring_axes, scores = partition.axes("sequence"), base.scores(config)
    operations = CachedAttention(partition.mesh, ring_axes, **scores)
    whole = NamedSharding(partition.mesh, PartitionSpec())

    def act(
        parameters: Any, steps: ChainBatch, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        agent = nnx.merge(model.structure, parameters)
        return agentic.act(agent, steps, cache, operations)

    program = jax.jit(act, donate_argnums=2, out_shardings=(whole, cache))
    dtype = jnp.dtype(config.compute_dtype)
    empty = functools.partial(empty_cache, shape, dtype, ring)
    return ContextActor(
        jax.jit(empty, out_shardings=cache), functools.partial(program, parameters)
    )


class Played(NamedTuple):
    """Episodes that went by.

    returns: float64 (E, episodes). steps: all of them, in their order, (E, S, …) each.
    """

    returns: np.ndarray
    steps: ChainBatch


@dataclass
class Play:
    """Episodes of E rows, one after the other, conditioned on a return.

    file: what the agent's observations are standardised by.
    target: the return that every episode is conditioned on.
    """

    actor: Actor
    file: TrajectoryFile
    target: float
    _done: list[ChainBatch] = field(default_factory=list)

    def play(self, scenes: Iterable[tuple[Scene, int]], forgetful: bool) -> Played:
        """Plays episodes of scenes, each named by its number in its scene.

        forgetful: whether every episode begins with an empty context.
        """
        self.actor.forget()
        self._done, returns = [], []
        for rank, (scene, number) in enumerate(scenes):
            if forgetful:
                self.actor.forget()
            returns.append(self._episode(scene, number, rank))
        steps = ChainBatch(
            *(np.stack(x, axis=1) for x in zip(*self._done, strict=True))
        )
        return Played(np.stack(returns, axis=1), steps)

    def _episode(self, scene: Scene, number: int, rank: int) -> np.ndarray:
        observations, total, last = scene.begin(number), 0.0, False
        timestep = 0
        while not last:
            present = self._present(observations, self.target - total, timestep, rank)
            observations, actions, rewards, last = scene.step(self.actor.act(present))
            total = total + rewards
            reached = (total >= self.target) & last
            done = present._replace(
                actions=actions.astype(np.float32),
                rewards=rewards.astype(np.float32),
                completions=reached.astype(np.float32),
                loss_weights=np.ones(len(rewards), np.float32),
            )
            self.actor.learn(done)
            self._done.append(done)
            timestep += 1
        return total

    def _present(
        self, observations: np.ndarray, left: np.ndarray, timestep: int, rank: int
    ) -> ChainBatch:
        rows = len(observations)
        zeros = np.zeros(rows, np.float32)
        whole = functools.partial(np.full, rows, dtype=np.int32)
        scale = self.file.observation_std + STD_FLOOR
        standard = (observations - self.file.observation_mean) / scale
        return ChainBatch(
            returns_to_go=np.broadcast_to(left, rows).astype(np.float32),
            observations=standard.astype(np.float32),
            actions=np.zeros((rows, self.file.action_size), np.float32),
            rewards=zeros,
            completions=zeros,
            timesteps=whole(timestep),
            ranks=whole(rank),
            positions=whole(len(self._done)),
            loss_weights=zeros,
        )
