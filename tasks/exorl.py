"""The task "exorl": an agent trained on chains of packed trajectories.

A batch's columns are environment steps; each is four tokens of the context, or one.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from data.agents.chains import PLACES, ChainBatch, Chains
from data.agents.trajectory_file import TrajectoryFile
from data.batch import Block
from data.rows import InOrder, TextBatches
from kernels import layouts
from kernels.layouts import Layout, Striped
from kernels.masks import Visible
from models.abstract import Model
from models.agentic import Agent, AgentConfig, check_step_tokens
from models.cloning import Cloner, ClonerConfig
from models.flops import layers_train_flops, paper_train_flops
from models.losses import Parts, action_errors
from models.rope import RopeScaling
from tasks import base, batch_rows, execution, trajectories
from tasks.base import Data, Objective, Task
from tasks.config_errors import names_fields
from training.feed import host_blocks
from training.mesh import Partition
from training.metrics import StepWork
from training.step import Counts, mean_pairs

DATA_FIELDS = (
    "trajectories",
    "held_out_share",
    "top_share",
    "chain_order",
    "latest_begin",
    "loss_on",
    "predict",
)
"""Fields of config.data that only this task reads."""
UNTURNED = RopeScaling("linear", factor=1e9)
"""Angles of RoPE that are nothing at any place."""
METHODS = ("transformer", "perceptron")
FIRST_BOUND = 4
"""Steps of a context in the first part of the held-out loss."""
HELD_OUT_SEED = 0
"""Seed of the validation chains, the same in all runs."""


identify = trajectories.identify


def make(config: ml_collections.ConfigDict, partition: Partition) -> Task:
    """Builds the task; reads no data.

    Raises:
      ValueError: something in the config is wrong.
    """
    agent = model(config, partition)

    def open_data() -> Data:
        file = trajectories.opened(config)
        return Data(
            batches=batches(config, partition, file, "train"),
            validation=validation_batches(config, partition, file),
            fingerprint=fingerprint(agent, file),
        )

    return Task(
        model=agent,
        execution=execution.execution(config, partition),
        batch_like=abstract_batch(config, partition),
        objective=objective(config, agent, partition),
        held_out=objective(config, agent, partition, by_place=True),
        work=step_work(config, agent),
        open_data=open_data,
    )


def objective(
    config: ml_collections.ConfigDict,
    model: Model,
    partition: Partition,
    by_place: bool = False,
) -> Objective:
    """Builds the loss by the rank of an episode in its chain.

    by_place: by how many steps of the context go before, instead.

    Raises:
      ValueError: an unknown implementation.
    """
    predict = predictions(config, model, partition)
    parts = Parts.by_rank(config.agent.chain_length)
    if by_place:
        parts = Parts.by_position(batch_shape(config)[1], FIRST_BOUND)
    count_of = count(config)

    def places(batch: ChainBatch) -> jax.Array:
        return batch.positions if by_place else batch.ranks

    def loss_sums(parameters: Any, batch: ChainBatch) -> jax.Array:
        return action_errors(
            predict(parameters, batch),
            batch.targets,
            batch.loss_weights,
            places(batch),
            actions=model.config.actions,
            parts=parts,
            partition=partition,
        )

    def counts(batch: ChainBatch) -> Counts:
        tokens, pairs = count_of(batch)
        return Counts(tokens, pairs, parts.sums(batch.loss_weights, places(batch)))

    return Objective(loss_sums, counts, parts.names)


@names_fields
def step_layout(config: ml_collections.ConfigDict) -> Layout:
    """Returns the layout of steps whose tokens lie in the config's layout.

    Raises:
      ValueError: the layout would cut a step, or this has no such number of tokens.
    """
    layout = base.attention_system(config).layout
    if not isinstance(layout, Striped):
        return layout
    tokens = config.agent.step_tokens
    check_step_tokens(tokens)
    if layout.granule % tokens:
        raise ValueError(
            f"{config.stripe_granule=} cuts the {tokens} tokens of a step: "
            f"make it a multiple of {tokens}"
        )
    return Striped(layout.granule // tokens)


@names_fields
def batch_shape(config: ml_collections.ConfigDict) -> tuple[int, int]:
    """Returns rows and steps of the global batch.

    Raises:
      ValueError: a step has no such number of tokens.
    """
    tokens = config.agent.step_tokens
    check_step_tokens(tokens)
    return config.data.batch_rows, config.data.context_tokens // tokens


@names_fields
def batch_sharding(
    config: ml_collections.ConfigDict, partition: Partition
) -> NamedSharding:
    """Returns the sharding of a batch's arrays, [B, S, ...].

    Raises:
      ValueError: rows or steps do not divide over the mesh, or the context is too short
        for a chain.
    """
    batch_rows.batch_sharding(config, partition)
    rows, steps = batch_shape(config)
    parts = batch_rows.row_parts(config, partition), partition.slices
    agent, tokens = config.agent, config.data.context_tokens
    divisor = agent.step_tokens * layouts.divisor(step_layout(config), *parts)
    chain = agent.step_tokens * agent.chain_length * agent.episode_steps
    needed = -(-max(chain, tokens) // divisor) * divisor
    if tokens != needed:
        raise ValueError(
            f"config.data.context_tokens={tokens} must hold {agent.chain_length=} "
            f"episodes of {agent.episode_steps=}, and divide into whole steps over the "
            f"ring of {partition.ring_size}: make it {needed}"
        )
    return partition.sharding(("batch", "sequence"), (rows, steps))


def abstract_batch(
    config: ml_collections.ConfigDict, partition: Partition
) -> ChainBatch:
    """Returns shape, dtype and sharding of a batch's arrays.

    Raises:
      ValueError: as `batch_sharding`.
    """
    sharding, shape = batch_sharding(config, partition), batch_shape(config)
    sizes = dict.fromkeys(("actions", "targets"), (config.agent.action_size,))
    sizes["observations"] = (config.agent.observation_size,)

    def array(name: str) -> jax.ShapeDtypeStruct:
        dtype = jnp.int32 if name in PLACES else jnp.float32
        whole = *shape, *sizes.get(name, ())
        return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding)

    return ChainBatch(*map(array, ChainBatch._fields))


@names_fields
def sizes(config: ml_collections.ConfigDict) -> AgentConfig | ClonerConfig:
    """Returns the sizes of the config's agent.

    Raises:
      ValueError: an unknown method, or sizes that make no model.
    """
    agent = config.agent
    if agent.method not in METHODS:
        raise ValueError(f"{config.agent.method=} must be one of {', '.join(METHODS)}")
    if agent.method == "perceptron":
        layers = config.model.hidden_size, config.model.num_layers
        ends = agent.observation_size, agent.action_size, agent.chain_length
        return ClonerConfig(*layers, *ends, agent.action_kind, agent.action_bins)
    given = config.model.to_dict() | agent.to_dict()
    known = {field.name for field in dataclasses.fields(AgentConfig)}
    fields = {name: value for name, value in given.items() if name in known}
    scaling = RopeScaling(**config.rope_scaling) if agent.reads_positions else UNTURNED
    return AgentConfig(**fields, rope_scaling=scaling)


@names_fields
def model(config: ml_collections.ConfigDict, partition: Partition) -> Model:
    """Builds the config's agent, without parameters.

    Raises:
      ValueError: an unknown method, sizes that make no model, or that do not divide
        over the mesh.
    """
    run, found = execution.execution(config, partition), sizes(config)

    def build(key: jax.Array) -> nnx.Module:
        rngs = nnx.Rngs(params=key)
        if isinstance(found, ClonerConfig):
            return Cloner(found, partition, rngs=rngs)
        return Agent(found, run, partition, rngs=rngs)

    return Model.of(found, build, partition)


def predictions(
    config: ml_collections.ConfigDict, model: Model, partition: Partition
) -> Callable[[Any, ChainBatch], jax.Array]:
    """Builds (parameters, batch in layout order) -> what is predicted, [B, S, P].

    Raises:
      ValueError: an unknown implementation.
    """
    attend = base.ring_attention(config, partition)

    def predict(parameters: Any, batch: ChainBatch) -> jax.Array:
        agent = nnx.merge(model.structure, parameters)
        if config.agent.method == "perceptron":
            return agent(batch.observations)
        index = agent.token_index(batch.positions)
        # Padding comes last, so it is visible to no step.
        visible = Visible(jnp.zeros_like(index), index + 1)
        return agent(batch, functools.partial(attend, visible=visible))

    return predict


def count(
    config: ml_collections.ConfigDict,
) -> Callable[[ChainBatch], tuple[jax.Array, jax.Array]]:
    """Builds batch -> tokens and visible pairs; a perceptron's tokens are steps."""
    tokens = config.agent.step_tokens
    windows = [kind.window for kind in getattr(sizes(config), "layer_kinds", ())]

    def counts(batch: ChainBatch) -> tuple[jax.Array, jax.Array]:
        # Where all else is 0, only the first step of a chain is not padding.
        is_real = (batch.timesteps > 0) | (batch.ranks > 0) | (batch.positions == 0)
        steps = is_real.sum(dtype=jnp.float32)
        if not windows:
            return steps, jnp.zeros((), jnp.float32)
        # The token at index i attends to i + 1 tokens, itself included.
        index = tokens * batch.positions[..., None]  # (B, S, 1)
        seen = index + np.arange(1, tokens + 1, dtype=np.int32)
        seen = jnp.where(is_real[..., None], seen, 0)  # (B, S, tokens of a step)
        return tokens * steps, mean_pairs(seen, seen, windows)

    return counts


def step_work(
    config: ml_collections.ConfigDict, model: Model
) -> Callable[[float, float], StepWork]:
    """Builds (tokens, visible pairs) of a step -> `StepWork`.

    Leaves out what comes before and after the layers: it is small.
    """
    rows, steps = batch_shape(config)
    if config.agent.method == "perceptron":
        size = sum(leaf.size for leaf in jax.tree.leaves(model.shapes))
        return lambda tokens, pairs: StepWork(
            int(tokens), 6.0 * size * tokens, 6.0 * size * rows * steps
        )
    tokens = config.agent.step_tokens * steps
    paper_flops = paper_train_flops(model.config, rows, tokens)

    def work(tokens: float, pairs: float) -> StepWork:
        model_flops = layers_train_flops(model.config, tokens, pairs)
        return StepWork(int(tokens), model_flops, paper_flops)

    return work


@names_fields
def batches(
    config: ml_collections.ConfigDict,
    partition: Partition,
    file: TrajectoryFile,
    split: str,
) -> TextBatches:
    """Returns this host's part of every batch of chains.

    Raises:
      ValueError: too few episodes for a chain; as `batch_sharding` and `episodes`.
    """
    sharding = batch_sharding(config, partition)
    rows, steps = batch_shape(config)
    chains = Chains(
        file,
        trajectories.episodes(config, file, split),
        config.agent.chain_length,
        config.seed if split == "train" else HELD_OUT_SEED,
        order=config.data.chain_order,
        latest_begin=config.data.latest_begin,
        loss_on=config.data.loss_on,
        predict=config.data.predict,
        of_step_before=config.agent.step_tokens == 1,
        multiple=steps,
    )
    blocks = host_blocks(sharding, (rows, steps))
    ring = partition.ring_size
    return TextBatches(chains, blocks, rows, step_layout(config), ring, InOrder())


def validation_batches(
    config: ml_collections.ConfigDict, partition: Partition, file: TrajectoryFile
) -> list[dict[Block, ChainBatch]]:
    """Reads chains of the held-out episodes, the same at every validation.

    Raises:
      ValueError: as `batches`.
    """
    if not config.train.validation_batches:
        return []
    held_out = batches(config, partition, file, "validation")
    return [held_out[number] for number in range(config.train.validation_batches)]


def fingerprint(model: Model, file: TrajectoryFile) -> dict[str, Any]:
    """Returns the properties in which a checkpoint's model must agree.

    Observations must be standardised as they were when it was trained.
    """
    data = {name: file.index[name] for name in ("observation_mean", "observation_std")}
    data["action_repeat"] = file.action_repeat
    sizes = base.identity(model.config, always=["rope_scaling"])
    return {"model": sizes, "trajectories": data}
