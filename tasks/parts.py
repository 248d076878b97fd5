"""What a run is made of: its objective, its data, its model and attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from data.batch import Block
from data.rows import TextBatches
from models.abstract import Model
from models.sizes import DecoderConfig
from training.step import Counts, LossFunction, TrainState
from training.update.at_once import Optimizer
from training.update.optimizer import Schedule

OnMesh = Any
"""A batch as a program takes it: JAX has no type for a tree of its arrays."""


@dataclass(frozen=True)
class Objective:
    """A loss to minimise.

    loss_sum: see `LossFunction`.
    count: batch -> `Counts`.
    part_names: names of the parts of the loss, if it has any.
    """

    loss_sum: LossFunction
    count: Callable[[Any], Counts]
    part_names: Sequence[str] = ()


@dataclass(frozen=True)
class Data:
    """The data of a run.

    batches: this host's blocks of the batch of any step.
    validation: this host's blocks of the held-out batches.
    fingerprint: properties of model and data in which a checkpoint must agree.
    """

    batches: TextBatches
    validation: Sequence[dict[Block, Any]]
    fingerprint: dict[str, Any]


@dataclass(frozen=True)
class ModelParts[Sizes: DecoderConfig]:
    """The model of a run, and the state that its updates change; of every mesh.

    schedule: the learning rate by updates made.
    state_shapes: shape and dtype of every leaf of the train state.
    """

    sizes: Sizes
    model: Model
    optimizer: Optimizer
    schedule: Schedule
    state_shapes: TrainState


class Scores(TypedDict):
    """Arguments of an attention: factor of q · k, and the bound that tanh keeps."""

    scale: float | None
    soft_cap: float | None
