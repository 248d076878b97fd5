"""From a config of task "exorl" to what acts: its programs and its context."""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from data.agents.chains import ChainBatch, of_step_before
from kernels.decode_attention import CachedAttention
from kernels.layouts import padded_length, permute
from models import agentic
from models.actions import Actions
from models.cache import Cache, empty_cache
from tasks.exorl import AgentRun
from tasks.generation import cache_shardings
from training.sharding.stationary import StationaryPartition


@dataclass
class Choice:
    """Makes actions (E, A) of predictions (E, P).

    temperature: what logits are divided by before an action is drawn; at 0 it is the
      likeliest.
    rng: draws them.
    hold: actions that share one draw's noise, so that exploration keeps a direction.
    """

    actions: Actions
    temperature: float
    rng: np.random.Generator
    hold: int = 1
    _noise: np.ndarray = field(default_factory=lambda: np.zeros(0))
    _drawn: int = 0

    def __call__(self, predicted: np.ndarray) -> np.ndarray:
        kind, bins = self.actions.kind, self.actions.bins
        if kind == "continuous":
            return predicted
        logits = predicted.astype(np.float64)
        if kind == "binned":
            logits = logits.reshape(len(logits), -1, bins)  # (E, A, K)
        if self.temperature:
            if self._drawn % self.hold == 0:
                self._noise = self.rng.gumbel(size=logits.shape)
            self._drawn += 1
            logits = logits / self.temperature + self._noise
        chosen = logits.argmax(axis=-1)
        if kind == "binned":
            return np.linspace(-1, 1, bins, dtype=np.float32)[chosen]
        return np.eye(logits.shape[-1], dtype=np.float32)[chosen]


Policy = Callable[[ChainBatch], np.ndarray]
"""From the present steps, (E,) each, to actions, float32 (E, A).

Of these steps, the action and what comes of it are not looked at. Rows with a loss
weight of 0 wait: what they do is left aside.
"""


def chance(choose: Choice) -> Policy:
    """Returns what draws actions evenly, of the kind that is to be chosen."""

    def act(present: ChainBatch) -> np.ndarray:
        rows, size = present.actions.shape
        if choose.actions.kind == "discrete":
            return np.eye(size, dtype=np.float32)[choose.rng.integers(size, size=rows)]
        return choose.rng.uniform(-1, 1, (rows, size)).astype(np.float32)

    return act


@dataclass
class Actor:
    """An agent that acts in E rows at a time.

    It sees all since it last forgot, through a KV cache that is sharded over the ring.

    empty: () -> cache. program: (steps (E, 2) or (E, 1), cache) -> (predictions (E, A),
    cache), see `agentic.act`; takes the cache's place.
    fill: (steps (E, S), empty cache) -> cache of them.
    has_one_token: whether a step is one token, with the reward of the step before.
    device_bytes: bytes that its context takes on each device.
    room: steps that a context can have. episode_steps: that an episode can have.
    """

    choose: Choice
    empty: Callable[[], Cache]
    program: Callable[[ChainBatch, Cache], tuple[jax.Array, Cache]]
    fill: Callable[[ChainBatch, Cache], Cache]
    has_one_token: bool
    device_bytes: int
    room: int
    episode_steps: int

    def forget(self) -> None:
        """Begins an empty context."""
        self._cache = self.empty()
        self._before = None
        self._position = np.int32(0)
        self._taken = 0

    def _take(self, steps: ChainBatch, count: int) -> None:
        """Counts steps of the context; ValueError if it or an episode has too many.

        The compiled programs would overwrite slots, and clip timesteps.
        """
        self._taken += count
        longest = int(steps.timesteps.max()) + 1
        if longest > self.episode_steps or self._taken > self.room:
            raise ValueError(
                f"a context must have at most {self.room} steps, and an episode "
                f"config.agent.episode_steps={self.episode_steps}, got {self._taken} "
                f"and {longest}: train with as many as the environment's episodes have"
            )

    def act(self, present: ChainBatch) -> np.ndarray:
        """Returns actions as a `Policy`; of rows that wait nothing is seen."""
        self._take(present, 1)
        # What stands before the first steps, at position -1, is not read.
        before = self._before or jax.tree.map(np.zeros_like, present)
        steps = jax.tree.map(lambda *x: np.stack(x, axis=1), before, present)
        positions = np.add.outer(self._position, np.int32([-1, 0]))  # (E, 2)
        waits = (present.loss_weights == 0)[:, None]
        positions = np.where(waits, np.int32(-1), positions)
        steps = steps._replace(positions=positions)
        if self.has_one_token:
            steps = jax.tree.map(lambda x: x[:, 1:], of_step_before(steps))
        predicted, self._cache = self.program(steps, self._cache)
        return self.choose(np.asarray(predicted))

    def learn(self, done: ChainBatch) -> None:
        """Takes the present steps with what was done and what came of it."""
        goes_on = done.loss_weights > 0
        before = self._before or done

        def kept(new: np.ndarray, old: np.ndarray) -> np.ndarray:
            return np.where(goes_on.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        self._before = jax.tree.map(kept, done, before)
        self._position = self._position + goes_on.astype(np.int32)

    def read(self, done: ChainBatch) -> None:
        """Takes all steps of whole episodes, (E, S) each, into an empty context.

        Those with a loss weight of 0 come last in each row, and are not taken.
        """
        self._position = (done.loss_weights > 0).sum(axis=1, dtype=np.int32)
        self._take(done, int(self._position.max()))
        rows = np.arange(len(self._position))
        self._before = jax.tree.map(lambda x: x[rows, self._position - 1], done)
        known = of_step_before(done) if self.has_one_token else done
        self._cache = self.fill(known, self._cache)


def actor(
    run: AgentRun,
    parameters: Any,
    *,
    rows: int,
    episodes: int,
    temperature: float = 1.0,
    hold: int = 1,
    seed: int = 0,
) -> Actor:
    """Returns the run's agent with its parameters, for E rows.

    episodes: that a context has to hold. temperature, hold, seed: of drawn actions, see
      `Choice`.

    Raises:
      ValueError: rows or heads do not divide over the mesh, or the context is larger
        than a device's memory.
    """
    config, partition = run.config, run.partition
    model = run.on(StationaryPartition(partition.mesh)).model
    actions = model.config.actions
    choice = Choice(actions, temperature, np.random.default_rng(seed), hold)
    parts = partition.shards("batch")
    if rows % parts:
        raise ValueError(
            f"{rows} environments do not divide over the batch's {parts} shards: act "
            f"in {-(-rows // parts) * parts}, or change config.mesh"
        )
    ring = partition.shards("sequence")
    sizes = config.model
    # Every step puts its tokens at one member of the ring.
    steps = -(-episodes * config.agent.episode_steps // ring) * ring
    slots = config.agent.step_tokens * steps
    shape = sizes.num_layers, rows, slots, sizes.num_kv_heads, sizes.head_dim
    cache = cache_shardings(partition, shape)
    empty = functools.partial(empty_cache, shape, run.compute_dtype, ring)
    held = _checked_bytes(cache, jax.eval_shape(empty), partition.mesh.local_devices[0])
    ring_axes = partition.axes("sequence")
    operations = CachedAttention(partition.mesh, ring_axes, **run.scores)
    whole = NamedSharding(partition.mesh, PartitionSpec())

    def act(
        parameters: Any, steps: ChainBatch, cache: Cache
    ) -> tuple[jax.Array, Cache]:
        agent = nnx.merge(model.structure, parameters)
        return agentic.act(agent, steps, cache, operations)

    program = jax.jit(act, donate_argnums=2, out_shardings=(whole, cache))
    return Actor(
        choice,
        jax.jit(empty, out_shardings=cache),
        functools.partial(program, parameters),
        functools.partial(_reader(run, operations, cache), parameters),
        config.agent.step_tokens == 1,
        held,
        steps,
        config.agent.episode_steps,
    )


def _checked_bytes(shardings: Cache, cache: Cache, device: jax.Device) -> int:
    """Returns the bytes of a cache on each device; ValueError if one has fewer."""
    held = sum(
        math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for sharding, array in zip(
            *map(jax.tree.leaves, (shardings, cache)), strict=True
        )
    )
    room = device_memory(device)
    if held > room:
        _, rows, slots, *_ = cache.keys.shape
        raise ValueError(
            f"contexts of {slots:,} tokens in {rows} environments take "
            f"{held / 1e9:,.1f} GB on each device, which has {room / 1e9:,.1f} GB: "
            "give fewer --environments, --episodes or --random, a --window, or a "
            "longer ring (config.mesh.ring)"
        )
    return held


def device_memory(device: jax.Device) -> int:
    """Returns a device's free bytes; of a simulated one, its share of the host's."""
    if stats := device.memory_stats():
        return stats["bytes_limit"] - stats["bytes_in_use"]
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host // jax.local_device_count()


def _reader(
    run: AgentRun, operations: CachedAttention, cache: Cache
) -> Callable[[Any, ChainBatch, Cache], Cache]:
    """Builds (parameters, steps in order, empty cache) -> cache, through the ring.

    cache: its shardings.
    """
    model, attend, partition = run.model, run.attention, run.partition
    layout = run.step_layout
    ring = partition.ring_size

    def fill(parameters: Any, steps: ChainBatch, cache: Cache) -> Cache:
        count = (steps.loss_weights > 0).sum(axis=1, dtype=jnp.int32)
        agent = nnx.merge(model.structure, parameters)
        return agentic.read(agent, steps, count, cache, attend, operations)

    program = jax.jit(fill, donate_argnums=2, out_shardings=cache)

    def read(parameters: Any, steps: ChainBatch, cache: Cache) -> Cache:
        count = steps.timesteps.shape[1]
        columns = padded_length(layout, ring, count, partition.slices)

        def padded(x: np.ndarray) -> np.ndarray:
            return np.pad(x, [(0, 0), (0, columns - count)] + [(0, 0)] * (x.ndim - 2))

        def sharded(x: np.ndarray) -> jax.Array:
            names = ("batch", "sequence") + (None,) * (x.ndim - 2)
            sharding = partition.sharding(names, x.shape)
            return jax.device_put(permute(x, layout, ring), sharding)

        steps = jax.tree.map(padded, steps)
        positions = np.arange(columns, dtype=np.int32)
        positions = np.broadcast_to(positions, steps.positions.shape)
        steps = jax.tree.map(sharded, steps._replace(positions=positions))
        return program(parameters, steps, cache)

    return read
