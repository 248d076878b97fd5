"""What a run trains, and on what: all that text and agents do not share.

`train.py` runs either of them; `config.task` says which.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_collections
from jax.sharding import NamedSharding

from data import token_file, trajectory_file
from data.batch import Batch, Block
from data.corpus import prepare_standard_library
from data.text import TextBatches
from models.blueprint import Model
from models.position_parts import PositionParts
from tasks import base as assemble
from tasks import exorl as assemble_agents
from tasks.config_errors import fields_by_name
from training.mesh import Partition
from training.metrics import StepWork
from training.step import Counts, LossFunction, count_tokens
from training.stored_step import is_named


@dataclass(frozen=True)
class Objective:
    """What is made small.

    loss_sum: from parameters and a batch to its summed loss, or losses of its parts.
    count: from a batch to what is in it.
    part_names: of the parts of the loss, if it has any.
    unit: of the loss.
    """

    loss_sum: LossFunction
    count: Callable[[Any], Counts]
    part_names: Sequence[str] = ()
    unit: str = "nats a token"


@dataclass(frozen=True)
class Task:
    """Objects of a run.

    batches, validation: this host's blocks of the batch of any step, and of those held
      out.
    batch_like: shape, type and sharding of a batch's arrays.
    objective: of training. held_out: what validations tell; the same or its parts.
    work: from a step's tokens and visible pairs to what it computes.
    fingerprint: what a checkpoint's model must agree in.
    """

    batches: TextBatches
    validation: Sequence[dict[Block, Any]]
    batch_like: Any
    model: Model
    objective: Objective
    held_out: Objective
    work: Callable[[float, float], StepWork]
    fingerprint: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a batch."""
        return self.batch_like.loss_weights.shape

    @property
    def sharding(self) -> NamedSharding:
        """Of a batch's rows and columns; further axes are whole on every device."""
        return self.batch_like.loss_weights.sharding

    @property
    def num_parameters(self) -> int:
        """Of the model, all of them."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.model.shapes))


def text(config: ml_collections.ConfigDict, partition: Partition) -> Task:
    """A LLaMA on a corpus."""
    _corpus(config)
    batches = assemble.batches(config, partition, "train")
    validation = assemble.validation_batches(config, partition)
    model = assemble.model(config, partition)
    loss_sum = assemble.loss_function(config, model, partition)
    return Task(
        batches=batches,
        validation=validation,
        batch_like=assemble.abstract_batch(config, partition),
        model=model,
        objective=Objective(loss_sum, count_tokens),
        held_out=_by_position(config, model, partition),
        work=assemble.step_work(config, model),
        fingerprint=assemble.fingerprint(model),
    )


def _by_position(
    config: ml_collections.ConfigDict, model: Model, partition: Partition
) -> Objective:
    """The loss of text by how far into its document a token is."""
    parts = PositionParts.within(config.data.context_tokens)

    def count(batch: Batch) -> Counts:
        weights = parts.sums(batch.loss_weights, batch.positions)
        return count_tokens(batch)._replace(weights=weights)

    loss_sum = assemble.loss_function(config, model, partition, parts)
    return Objective(loss_sum, count, parts.names)


def exorl(config: ml_collections.ConfigDict, partition: Partition) -> Task:
    """An agent on chains of trajectories."""
    file = assemble_agents.trajectories(config)
    batches = assemble_agents.batches(config, partition, file, "train")
    validation = assemble_agents.validation_batches(config, partition, file)
    model = assemble_agents.model(config, partition)
    by_rank = Objective(
        assemble_agents.loss_function(config, model, partition),
        assemble_agents.count(config),
        [f"rank_{rank}" for rank in range(1, config.agent.chain_length + 1)],
        unit="squared error of actions",
    )
    return Task(
        batches=batches,
        validation=validation,
        batch_like=assemble_agents.abstract_batch(config, partition),
        model=model,
        objective=by_rank,
        held_out=by_rank,
        work=assemble_agents.step_work(config, model),
        fingerprint=assemble_agents.fingerprint(model, file),
    )


TASKS = {"text": text, "exorl": exorl}

# Fields in which the hosts of a run may differ, and its starts.
_OF_A_HOST = (
    "hosts",
    "simulated_devices",
    "profile",
    "data.threads",
    "data.buffered_steps",
    "data.compare_digests",
)
# Fields that only the other task reads.
_UNREAD = {
    "text": ("agent", *(f"data.{name}" for name in assemble_agents.DATA_FIELDS)),
    "exorl": ("model.vocab_size", "data.corpus", "data.rows"),
}


def make(config: ml_collections.ConfigDict, partition: Partition) -> Task:
    """The task that `config.task` names.

    Raises:
      ValueError, FileNotFoundError: there is no such task, or something in the config
        or the data is wrong; before anything is compiled.
    """
    _check_task(config)
    return TASKS[config.task](config, partition)


def settings(
    config: ml_collections.ConfigDict, say: Callable[[str], None]
) -> dict[str, Any]:
    """What makes the run, JSON values by dotted name (see `training/record.py`).

    That is every field that its task reads, but for what hosts have of their own, and a
    digest of the data.

    say: is told what of the data is not compared with its digests.

    Raises:
      ValueError, FileNotFoundError: there is no such task, or no such data, or they are
        not what was written.
    """
    _check_task(config)
    left_out = (*_OF_A_HOST, *_UNREAD[config.task])
    fields = fields_by_name(config)
    read = {name: fields[name] for name in fields if not is_named(name, left_out)}
    if config.task == "text":
        field, where, kind = "data.corpus", _corpus(config), token_file
    else:
        field, kind = "data.trajectories", trajectory_file
        where = assemble_agents.directory(config)
    digest, unread = kind.identify(where, compare=config.data.compare_digests)
    if unread:
        say(f"data: {unread}")
    return json.loads(json.dumps(read | {f"{field}.contents": digest}))


def _check_task(config: ml_collections.ConfigDict) -> None:
    if config.task not in TASKS:
        raise ValueError(f"{config.task=} is not one of {', '.join(TASKS)}")


def _corpus(config: ml_collections.ConfigDict) -> Path:
    """Where the corpus is; the default one is prepared where it is missing."""
    if config.data.corpus:
        return Path(config.data.corpus)
    return prepare_standard_library(assemble.STANDARD_LIBRARY)
