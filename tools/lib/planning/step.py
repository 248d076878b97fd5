"""The training step that `train.py` runs, put together for described devices."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from data.batch import Batch
from kernels.backends import IMPLEMENTATIONS, choose
from models.blueprint import Model
from tasks import base, config_checks, text
from tools.lib.planning import h200, topology
from tools.lib.planning.context import MOST_TOKENS
from training import chips
from training.chips import Chip
from training.mesh import Partition
from training.metrics import StepWork
from training.optimizer import make_optimizer
from training.step import TrainState

GPUS_OF_A_HOST = 8


class TooLarge(Exception):
    """The compiler finds no program that fits into the chip's memory."""


@dataclass(frozen=True)
class Pod:
    """Described devices, and how to compile for them.

    compile_for: from a mesh, a function and its arguments to a compiled program.
    """

    topology: str
    devices: list[jax.Device]
    compile_for: Callable[..., jax.stages.Compiled]

    @property
    def chip(self) -> Chip:
        """What one device can do."""
        return chips.find(self.devices[0].device_kind)

    def compile_to_fit(
        self, mesh: jax.sharding.Mesh, *program: Any
    ) -> jax.stages.Compiled:
        """As `compile_for`.

        Raises:
          TooLarge: the compiler finds no program that fits.
        """
        try:
            return self.compile_for(mesh, *program)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            sizes = re.findall(r"\b(\d+(?:\.\d+)?[KMGT])i?B?\b", str(error))[:2]
            how_much = f": it takes {sizes[0]} of {sizes[1]}" if sizes[1:] else ""
            raise TooLarge(f"the step does not fit{how_much}") from error


def known_topologies() -> dict[str, list[str]]:
    """Names of topologies, by chip: those sold, as slices that grow by doubling."""
    known = {}
    for chip, pod in topology.PODS.items():
        counts = [math.prod(pod.smallest) * pod.devices_per_chip]
        while counts[-1] < pod.most_chips * pod.devices_per_chip:
            counts.append(2 * counts[-1])
        shapes = ("x".join(map(str, pod.grow(count))) for count in counts)
        known[chip] = [f"{chip}:{shape}" for shape in shapes]
    gpus = (2**power for power in range(int(math.log2(GPUS_OF_A_HOST)) + 1))
    return known | {"h200": [f"h200:1x1x{count}" for count in gpus]}


def described_pod(name: str) -> Pod:
    """The pod of a topology's name: v4:8x8x8, or h200:1x1x8 for 8 GPUs of a host.

    Raises:
      ValueError: there is no such topology; the message lists those there are.
      ModuleNotFoundError: the compiler for it is not installed.
    """
    known = known_topologies()
    chip, _, shape = name.partition(":")
    names = ", ".join(known.get(chip) or sum(known.values(), []))
    refusal = f"topology={name!r} cannot be described: known are {names}"
    if chip not in known or re.fullmatch(r"\d+(x\d+)+", shape) is None:
        raise ValueError(refusal)
    if chip == "h200":
        if re.fullmatch(rf"1x1x[1-{GPUS_OF_A_HOST}]", shape) is None:
            raise ValueError(refusal)
        return Pod(name, h200.described(int(shape[4:])), h200.compile_for)
    try:
        return Pod(name, topology.described(name), topology.compile_for)
    except ValueError as error:
        raise ValueError(refusal) from error


@dataclass(frozen=True)
class Step:
    """The training step of a config on described devices, before it is compiled.

    program: from state and batch to state and metrics, jitted.
    state, batch: shapes, types and shardings of its arguments.
    implementation: the attention kernel that it runs.
    """

    config: ml_collections.ConfigDict
    pod: Pod
    partition: Partition
    model: Model
    program: jax.stages.Wrapped
    state: TrainState
    batch: Batch
    implementation: str

    @classmethod
    def of(cls, config: ml_collections.ConfigDict, pod: Pod) -> "Step":
        """Puts the step together, as `train.py` does.

        Raises:
          ValueError: something in the config is wrong, or does not suit the devices.
        """
        check(config, len(pod.devices))
        partition = base.partition(config, pod.devices)
        batch = text.abstract_batch(config, partition)
        model = text.model(config, partition)
        optimizer, _ = make_optimizer(base.optimizer_settings(config))
        state = base.abstract_state(model, optimizer, partition)
        loss_sum = text.loss_function(config, model, partition)
        program = base.train_step(config, loss_sum, optimizer, state)
        kernel = _implementation(config, partition)
        return cls(config, pod, partition, model, program, state, batch, kernel)

    def compile(self) -> jax.stages.Compiled:
        """The scheduled program.

        Raises:
          TooLarge: the compiler finds none that fits.
        """
        mesh = self.partition.mesh
        return self.pod.compile_to_fit(mesh, self.program, self.state, self.batch)

    def work(self) -> StepWork:
        """What a step computes, if each row is one document without padding."""
        rows, columns = base.batch_shape(self.config)
        pairs = rows * columns * (columns + 1) / 2
        return text.step_work(self.config, self.model)(rows * columns, pairs)


def check(config: ml_collections.ConfigDict, devices: int | None = None) -> None:
    """Raises ValueError if the config has no step that can be planned.

    devices: that it is planned for, with its own mesh; None for any mesh.
    """
    if config.task != "text":
        raise ValueError(
            f"{config.task=} is not planned here, only 'text': for agents see "
            "tools/plan_exorl.py"
        )
    if not 1 <= config.data.context_tokens <= MOST_TOKENS:
        raise ValueError(
            f"{config.data.context_tokens=} must be at least 1 and at most "
            f"{MOST_TOKENS}, as indices are int32"
        )
    config_checks.check(config, devices)


def _implementation(config: ml_collections.ConfigDict, partition: Partition) -> str:
    system = base.attention_system(config)
    name = system.implementation or config.implementation or None
    with jax.sharding.use_abstract_mesh(partition.mesh.abstract_mesh):
        chosen = choose(name, jnp.dtype(config.compute_dtype))
    return next(name for name, it in IMPLEMENTATIONS.items() if it is chosen)
