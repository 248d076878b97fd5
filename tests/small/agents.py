"""A small agent, trajectories for it, and a batch of their chains."""

import functools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from configs import exorl_tiny
from data.agents.chains import ChainBatch, Chains
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from kernels.layouts import permute
from models.abstract import Model
from tasks.exorl import AgentRun
from tests.cases import table
from tests.cases.attention import QUICK
from training.sharding.mesh import MeshShape, Partition, make_mesh

SMALL = dict(table("runs.txt", "small_agent"))
EPISODE_STEPS, ROWS = SMALL["agent.episode_steps"], SMALL["data.batch_rows"]
OBSERVATION_SIZE, ACTION_SIZE = (
    SMALL[f"agent.{part}_size"] for part in ("observation", "action")
)

ONE_TOKEN = {
    "agent__step_tokens": 1,
    "agent__action_kind": "discrete",
    "agent__reads_returns": False,
    "agent__reads_positions": False,
    "data__context_tokens": 16,
}
"""Fields of an agent that reads a step as one token and predicts logits."""
CLONER = {"model__layer_pattern": "w", "model__window": 1}
"""Fields of an agent that sees the present state alone."""


def config_of(**overrides: Any) -> ConfigDict:
    """`configs/exorl_tiny.py`, made small; `__` in a field's name for the dot."""
    config = exorl_tiny.get_config()
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    config.update_from_flattened_dict(SMALL | names)
    return config


def make_trajectories(directory: Path, episodes: int = 12) -> TrajectoryFile:
    """Packed episodes of random numbers, each of EPISODE_STEPS."""
    rng = np.random.default_rng(4)
    about = {"domain": "made_up", "task": "any", "action_repeat": 2}
    with TrajectoryWriter(directory / "trajectories", about) as writer:
        for _ in range(episodes):
            writer.write(
                rng.normal(3, 2, (EPISODE_STEPS, OBSERVATION_SIZE)),
                rng.uniform(-1, 1, (EPISODE_STEPS, ACTION_SIZE)),
                rng.uniform(size=EPISODE_STEPS),
            )
    return TrajectoryFile.open(directory / "trajectories")


def chains_of(file: TrajectoryFile, config: ConfigDict, **options: Any) -> ChainBatch:
    """A batch of the config's shape, in the order of the chains."""
    rows, tokens = config.data.batch_rows, config.agent.step_tokens
    steps = config.data.context_tokens // tokens
    episodes = np.arange(len(file.returns))
    length = config.agent.chain_length
    options["of_step_before"] = tokens == 1
    chains = Chains(file, episodes, length, seed=1, multiple=steps, **options)
    index = np.arange(steps, dtype=np.int32)
    read = [chains.read(row, index) for row in range(rows)]
    return ChainBatch(*map(np.stack, zip(*read, strict=True)))


def drawn(model: Model, partition: Partition) -> Any:
    """Parameters large enough for every part to matter; the same on every mesh."""
    rng = np.random.default_rng(1)

    def draw(path: tuple, shape: jax.ShapeDtypeStruct, names: tuple) -> jax.Array:
        offset = 1.0 if "scale" in str(path[-1]) else 0.0
        values = (offset + 0.2 * rng.standard_normal(shape.shape)).astype(np.float32)
        return jax.device_put(values, partition.sharding(names, shape.shape))

    return jax.tree_util.tree_map_with_path(draw, model.shapes, model.axes)


class Run:
    """The small agent on a mesh; its programs are compiled when they are needed."""

    def __init__(self, shape: MeshShape, attention: str, **overrides: Any):
        mesh = {f"mesh__{axis}": size for axis, size in shape.axes.items()}
        self.config = config_of(attention=attention, **mesh | overrides)
        devices = jax.devices()[: math.prod(shape.axes.values())]
        self.partition = Partition(make_mesh(shape, devices))
        self.run = run = AgentRun(self.config, self.partition)
        self.model, loss_sum = run.model, run.objective.loss_sum
        self.parameters = drawn(self.model, self.partition)

        def total(parameters: Any, batch: ChainBatch) -> tuple[jax.Array, jax.Array]:
            losses = loss_sum(parameters, batch)
            return losses.sum(), losses

        shardings = None, jax.tree.map(lambda x: x.sharding, self.parameters)
        gradient = jax.value_and_grad(total, has_aux=True)
        predict = run.predictions()
        options = {"compiler_options": QUICK}
        self._gradient = jax.jit(gradient, out_shardings=shardings, **options)
        self._predict = jax.jit(predict, **options)

    def _placed(self, batch: ChainBatch) -> ChainBatch:
        """The batch in layout order, on the mesh."""
        order = self.run.step_layout, self.partition.ring_size
        permuted = jax.tree.map(lambda x: permute(x, *order), batch)
        return jax.device_put(permuted, self.run.sharding)

    def losses_and_gradients(self, batch: ChainBatch) -> tuple[np.ndarray, Any]:
        (_, losses), grads = self._gradient(self.parameters, self._placed(batch))
        return jax.device_get((losses, grads))

    def actions(self, batch: ChainBatch) -> np.ndarray:
        """Predicted for a batch in the order of the chains; on one device only."""
        return np.asarray(self._predict(self.parameters, self._placed(batch)))


@functools.cache
def one_device(**overrides: Any) -> Run:
    """The small agent on one device."""
    return Run(MeshShape(), "vanilla", **overrides)
