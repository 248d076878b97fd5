"""The task "exorl": an agent trained on chains of packed trajectories.

A batch's columns are environment steps; each is four tokens of the context, or one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from data.agents.chains import INTEGERS, ChainBatch, Chains
from data.agents.trajectory_file import TrajectoryFile
from data.batch import Block
from data.rows import InOrder, RowPlan, TextBatches
from kernels import layouts
from kernels.layouts import Layout, Striped
from kernels.masks import Visible
from models.abstract import Model
from models.agentic import Agent, AgentConfig, check_step_tokens
from models.flops import layers_train_flops, paper_train_flops
from models.losses import Parts, action_errors
from models.rope import RopeScaling
from tasks import trajectories
from tasks.config_errors import names_fields
from tasks.layout_choice import ChoosingRun
from tasks.parts import Data, Objective, OnMesh
from tasks.state import identity
from training.reports.metrics import StepWork
from training.sharding.feed import host_blocks
from training.step import Counts, mean_pairs

DATA_FIELDS = (
    "trajectories",
    "held_out_share",
    "split_seed",
    "top_share",
    "chain_order",
    "latest_begin",
    "predict",
)
"""Fields of config.data that only this task reads."""
UNTURNED = RopeScaling("linear", factor=1e9)
"""Angles of RoPE that are nothing at any position."""
FIRST_BOUND = 4
"""Steps of a context in the first part of the held-out loss."""
HELD_OUT_SEED = 0
"""Seed of the validation chains, the same in all runs."""


identify = trajectories.identify


@names_fields
def sizes(config: ml_collections.ConfigDict) -> AgentConfig:
    """Returns the sizes of the config's agent.

    Raises:
      ValueError: sizes that make no model.
      FileNotFoundError, ValueError: as `trajectories.opened`, for columns that are 0.
    """
    agent = config.agent
    given = config.model.to_dict() | agent.to_dict()
    if not all(agent[name] for name in trajectories.SIZES):
        file = trajectories.opened(config)
        given |= {name: getattr(file, name) for name in trajectories.SIZES}
    known = {field.name for field in dataclasses.fields(AgentConfig)}
    fields = {name: value for name, value in given.items() if name in known}
    scaling = RopeScaling(**config.rope_scaling) if agent.reads_positions else UNTURNED
    return AgentConfig(**fields, rope_scaling=scaling)


class AgentRun(ChoosingRun[AgentConfig]):
    """A run that trains an agent."""

    def read_sizes(self) -> AgentConfig:
        return sizes(self.config)

    @functools.cached_property
    @names_fields
    def step_tokens(self) -> int:
        """Tokens of a step; ValueError if it cannot have as many."""
        check_step_tokens(self.config.agent.step_tokens)
        return self.config.agent.step_tokens

    @functools.cached_property
    @names_fields
    def step_layout(self) -> Layout:
        """Layout of the steps, of which each token lies in the run's layout.

        Raises:
          ValueError: it would cut a step.
        """
        layout = self.system.layout
        tokens = self.step_tokens
        if not isinstance(layout, Striped):
            return layout
        if layout.granule % tokens:
            raise ValueError(
                f"granule={layout.granule} cuts the {tokens} tokens of a step: "
                f"make it a multiple of {tokens}"
            )
        return Striped(layout.granule // tokens)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and steps of the global batch."""
        data = self.config.data
        return data.batch_rows, data.context_tokens // self.step_tokens

    def check_batch(self) -> None:
        """Raises ValueError as `Run` does, or if no chain divides into the context."""
        super().check_batch()
        config = self.config
        agent = config.agent
        ring_size = self.partition.ring_size
        slices = self.partition.slices
        divisor = layouts.divisor(self.step_layout, ring_size, slices)
        divisor *= self.step_tokens
        chain = self.step_tokens * agent.chain_length * agent.episode_steps
        context = config.data.context_tokens
        needed = -(-max(chain, context) // divisor) * divisor
        if context != needed:
            raise ValueError(
                f"config.data.context_tokens={context} must hold "
                f"{agent.chain_length=} episodes of {agent.episode_steps=}, and divide "
                f"into whole steps over the ring of {self.partition.ring_size}: make "
                f"it {needed}"
            )

    def build_model(self) -> Model:
        partition = self.partition

        def build(key: jax.Array) -> nnx.Module:
            rngs = nnx.Rngs(params=key)
            return Agent(self.sizes, self.execution, partition, rngs=rngs)

        return Model.of(self.sizes, build, partition)

    @functools.cached_property
    def batch_like(self) -> ChainBatch:
        """Shape, dtype and sharding of a batch's arrays."""
        sizes = {
            "actions": (self.sizes.action_size,),
            "targets": (self.sizes.action_size,),
            "observations": (self.sizes.observation_size,),
        }
        arrays = []
        for name in ChainBatch._fields:
            shape = (*self.shape, *sizes.get(name, ()))
            dtype = jnp.int32 if name in INTEGERS else jnp.float32
            arrays.append(jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding))
        return ChainBatch._make(arrays)

    @functools.cached_property
    def objective(self) -> Objective:
        """The loss by the rank of an episode in its chain."""
        return self._objective(Parts.by_rank(self.config.agent.chain_length), "ranks")

    @functools.cached_property
    def held_out(self) -> Objective:
        """The loss by how many steps of the context go before."""
        return self._objective(
            Parts.by_position(self.shape[1], FIRST_BOUND), "positions"
        )

    def _objective(self, parts: Parts, field: str) -> Objective:
        """Builds the loss by parts. field: of the batch's array that says which one."""
        predict = self.predictions()

        def loss_sums(parameters: Any, batch: OnMesh) -> jax.Array:
            return action_errors(
                predict(parameters, batch),
                batch.targets,
                batch.loss_weights,
                getattr(batch, field),
                actions=self.sizes.actions,
                parts=parts,
                partition=self.partition,
            )

        def counts(batch: OnMesh) -> Counts:
            weights = parts.sums(batch.loss_weights, getattr(batch, field))
            tokens, pairs = self.count(batch)
            return Counts(tokens, pairs, weights)

        return Objective(loss_sums, counts, parts.names)

    def predictions(self) -> Callable[[Any, OnMesh], jax.Array]:
        """Builds (parameters, batch in layout order) -> what is predicted, [B, S, P].

        Raises:
          ValueError: an unknown implementation.
        """
        attend = self.attention
        structure = self.model.structure

        def predict(parameters: Any, batch: OnMesh) -> jax.Array:
            agent = nnx.merge(structure, parameters)
            index = agent.token_index(batch.positions)
            # Padding comes last, so it is visible to no step.
            visible = Visible(jnp.zeros_like(index), index + 1)
            return agent(batch, functools.partial(attend, visible=visible))

        return predict

    def count(self, batch: OnMesh) -> tuple[jax.Array, jax.Array]:
        """Returns a batch's tokens and visible pairs."""
        # Where all else is 0, only the first step of a chain is not padding.
        is_real = (batch.timesteps > 0) | (batch.ranks > 0) | (batch.positions == 0)
        steps = is_real.sum(dtype=jnp.float32)
        tokens = self.step_tokens
        # The token at index i attends to i + 1 tokens, itself included.
        index = tokens * batch.positions[..., None]  # (B, S, 1)
        seen = index + np.arange(1, tokens + 1, dtype=np.int32)
        seen = jnp.where(is_real[..., None], seen, 0)  # (B, S, tokens of a step)
        windows = [kind.window for kind in self.sizes.layer_kinds]
        return tokens * steps, mean_pairs(seen, seen, windows)

    def work(self, tokens: float, pairs: float) -> StepWork:
        """Returns a step's work, without what comes before and after the layers."""
        rows, steps = self.shape
        flops = layers_train_flops(self.sizes, tokens, pairs)
        paper_flops = paper_train_flops(self.sizes, rows, self.step_tokens * steps)
        return StepWork(int(tokens), flops, paper_flops)

    def open_data(self) -> Data:
        file = trajectories.opened(self.config)
        return Data(
            self.batches(file, "train"), self.validation(file), self.fingerprint(file)
        )

    @names_fields
    def batches(self, file: TrajectoryFile, split: str) -> TextBatches:
        """Returns this host's part of every batch of chains.

        Raises:
          ValueError: too few episodes for a chain; as `check_batch` and `episodes`.
        """
        config = self.config
        rows, steps = self.shape
        blocks = host_blocks(self.sharding, self.shape)  # checks the batch first
        chains = Chains(
            file,
            trajectories.episodes(config, file, split),
            config.agent.chain_length,
            config.seed if split == "train" else HELD_OUT_SEED,
            order=config.data.chain_order,
            latest_begin=config.data.latest_begin,
            predict=config.data.predict,
            of_step_before=self.step_tokens == 1,
            multiple=steps,
        )
        return TextBatches(
            cast(RowPlan, chains),  # whose rows are another NamedTuple than text's
            blocks,
            rows,
            self.step_layout,
            self.partition.ring_size,
            InOrder(),
        )

    def validation(self, file: TrajectoryFile) -> Sequence[dict[Block, Any]]:
        """Reads chains of the held-out episodes, the same at every validation.

        Raises:
          ValueError: as `batches`.
        """
        if not self.config.train.validation_batches:
            return []
        held_out = self.batches(file, "validation")
        return [held_out[n] for n in range(self.config.train.validation_batches)]

    def fingerprint(self, file: TrajectoryFile) -> dict[str, Any]:
        """Returns the properties in which a checkpoint's model must agree.

        Observations must be standardised as they were when it was trained.
        """
        names = "observation_mean", "observation_std"
        data = {name: file.index[name] for name in names}
        data["action_repeat"] = file.action_repeat
        sizes = identity(self.sizes, always=["rope_scaling"])
        sizes["rank_embedding"] = False  # as in checkpoints that might have had one
        if self.step_tokens == 1:
            # Before, the last one of an episode was never read.
            sizes["all_rewards"] = True
        return {"model": sizes, "trajectories": data}
