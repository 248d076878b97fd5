"""Builds the training step that `train.py` runs for the devices of an AOT topology."""

from dataclasses import dataclass
from typing import Any

import jax
import ml_collections

from kernels.backends import IMPLEMENTATIONS, choose
from tasks import config_checks
from tasks.frozen import abstract_frozen
from tasks.run import Run
from tasks.task import make_run
from tools.lib.compiled.pods import Pod, compile_to_fit
from tools.lib.planning.clock import layer_masks
from tools.lib.planning.largest import MOST_TOKENS
from tools.lib.planning.visible import visible_pairs
from training.metrics import StepWork


@dataclass(frozen=True)
class Step:
    """The training step of a config on the devices of a pod, before it is compiled.

    program: (state, batch, frozen) -> (state, metrics), jitted.
    frozen: shapes, dtypes and shardings of the parameters that are not trained.
    implementation: the attention kernel that it runs.
    documents: lengths of those packed in a row, repeated; none for one document.
    """

    run: Run
    pod: Pod
    program: jax.stages.Wrapped
    frozen: Any
    implementation: str
    documents: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        config: ml_collections.ConfigDict,
        pod: Pod,
        documents: tuple[int, ...] = (),
    ) -> "Step":
        """Builds the step as `train.py` does.

        Raises:
          ValueError: something in the config is wrong, or does not suit the devices.
        """
        check(config, len(pod.devices))
        run = make_run(config, pod.devices)
        frozen = abstract_frozen(run.model, run.partition)
        kernel = _implementation(run)
        return cls(run, pod, run.train_step(), frozen, kernel, documents)

    def compile(self) -> jax.stages.Compiled:
        """Compiles and schedules the program.

        Raises:
          TooLarge: the compiler finds no program that fits.
        """
        rest = (self.frozen,) if self.frozen else ()
        arguments = self.run.state_like, self.run.batch_like, *rest
        return compile_to_fit(self.run.partition.mesh, self.program, *arguments)

    def work(self) -> StepWork:
        """Returns the work of a step whose rows are documents; without padding."""
        data, masks = self.run.config.data, layer_masks(self.run)
        rows, tokens = data.batch_rows, data.context_tokens
        pairs = [visible_pairs(self.documents, tokens, mask) for mask in masks]
        return self.run.work(rows * tokens, rows * sum(pairs) / len(pairs))


def check(config: ml_collections.ConfigDict, devices: int | None = None) -> None:
    """Raises ValueError if the config has no step that can be planned.

    devices: number of devices, for the config's own mesh; None for any mesh.
    """
    if config.task == "exorl" and config.agent.method == "perceptron":
        raise ValueError(
            f"{config.agent.method=} has no attention to plan: set "
            'config.agent.method="transformer"'
        )
    if not 1 <= config.data.context_tokens <= MOST_TOKENS:
        raise ValueError(
            f"{config.data.context_tokens=} must be at least 1 and at most "
            f"{MOST_TOKENS}, as indices are int32"
        )
    config_checks.check(config, devices)


def _implementation(run: Run) -> str:
    with jax.sharding.use_abstract_mesh(run.partition.mesh.abstract_mesh):
        chosen = choose(run.implementation, run.compute_dtype)
    return next(name for name, it in IMPLEMENTATIONS.items() if it is chosen)
