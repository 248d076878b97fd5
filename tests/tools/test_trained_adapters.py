"""Adapters against PEFT's: losses of training, and that nothing else is trained."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.batch import Batch
from kernels.layouts import permute
from tasks.systems import attention_system
from tasks.text import TextRun
from tests import small_llama
from tests.models.test_memory import products
from tests.small_llama import assert_same, partition_of
from tests.tools import hf_models
from tools.lib.hf import adapters
from tools.lib.hf.reading import load
from training.mesh import MeshShape
from training.step import initial_state

DIRECTORY = Path(__file__).parents[1] / "fixtures" / "peft_adapters"
STEPS = 20
SETTINGS = {
    "lora__rank": 4,
    "lora__alpha": 6.0,
    "optimizer__peak_lr": 1e-2,
    "optimizer__end_lr": 1e-2,
    "optimizer__warmup_steps": 0,
    "train__steps": STEPS,
    "data__context_tokens": 48,
}
"""Of tests/fixtures/make_peft_adapters.py."""
WIDE = {"lora__base_dtype": "float32"}
"""The others' weights are numbers of bfloat16."""
CHUNKS = {"train__microbatches": 2, "feed_forward_chunk_tokens": 5}
RING = MeshShape(ring=4)
CUBE = MeshShape(fsdp=2, ring=2, tensor=2)

slow = pytest.mark.slow


class Run:
    """A fixture's model with adapters of rank 4 on a mesh."""

    def __init__(self, name: str, shape: MeshShape, **overrides: Any):
        mesh = {f"mesh__{axis}": size for axis, size in shape.axes.items()}
        self.config = hf_models.run_config(name, **SETTINGS | mesh | overrides)
        self.partition = partition_of(shape)
        self.run = TextRun(self.config, self.partition)
        self.model = self.run.model
        plain = TextRun(hf_models.run_config(name), self.partition).model
        weights = hf_models.loaded(name, plain, self.partition)
        like = self.model.frozen_shapes
        self.frozen = jax.tree.map(lambda x, y: x.astype(y.dtype), weights, like)

    def train(self, parameters: Any, batches: np.ndarray) -> tuple[list[float], Any]:
        """Losses of a step for each batch of tokens (B, T), and the last adapters."""
        like, optimizer = self.run.state_like, self.run.optimizer
        step, losses = self.run.train_step(), []
        placing = jax.tree.map(lambda leaf: leaf.sharding, like)
        state = jax.device_put(initial_state(parameters, optimizer), placing)
        for tokens in batches:
            state, metrics = step(state, self.batch(tokens), self.frozen)
            losses.append(float(metrics["loss"]))
        return losses, jax.device_get(state.params)

    def batch(self, tokens: np.ndarray) -> Batch:
        """Rows (B, T), whose tokens predict the next; in order, on the mesh."""
        index = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
        weights = (index < index.shape[1] - 1).astype(np.float32)
        targets = np.roll(tokens, -1, axis=1)
        rows = Batch(tokens, targets, weights, index, np.zeros_like(index), index + 1)
        layout = attention_system(self.config).layout
        ordered = (permute(x, layout, self.partition.ring_size) for x in rows)
        sharding = self.partition.sharding(("batch", "sequence"), tokens.shape)
        return jax.device_put(Batch(*ordered), sharding)


@functools.cache
def training(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(DIRECTORY / name / "training.npz"))


class Tensors(dict[str, np.ndarray]):
    """In the place of files."""

    def read(self, name: str, index: Any) -> np.ndarray:
        return self[name][index]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.items()}


def adapters_of(name: str, when: str, run: Run) -> Any:
    """PEFT's, before or after training."""
    start = f"{when}."
    found = training(name).items()
    tensors = {n.removeprefix(start): x for n, x in found if n.startswith(start)}
    weights = adapters.weights_of(run.model)
    return load(Tensors(tensors), weights, run.model, run.partition)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, shape, fields",
    [
        ("llama_gqa", CUBE, WIDE | CHUNKS | {"remat": "products"}),
        pytest.param(
            *("llama_gqa", RING, WIDE | {"remat": "nothing", "attention_parts": 2}),
            marks=slow,
        ),
        pytest.param("gemma2", CUBE, CHUNKS, marks=slow),
    ],
)
def test_losses_and_adapters_of_training_are_pefts(name, shape, fields):
    run, wanted = Run(name, shape, **fields), training(name)
    start = adapters_of(name, "initial", run)
    losses, last = run.train(start, wanted["tokens"])
    np.testing.assert_allclose(losses, wanted["losses"], rtol=1e-5)
    assert_same(last, jax.device_get(adapters_of(name, "final", run)), 1e-4)


LORA = {"lora__rank": 3, "lora__alpha": 3.0, "lora__base_dtype": "float32"}


@functools.cache
def on_one_device(family: str) -> tuple[np.ndarray, Any]:
    """Loss, and gradients of the adapters."""
    run = small_llama.Run(MeshShape(), "vanilla", family, **LORA)
    return run.answer()


@slow
@pytest.mark.parametrize(
    "attention, shape, remat, family",
    [
        ("vanilla", MeshShape(data=2, tensor=2), "everything", "every_part"),
        ("memory_efficient", MeshShape(fsdp=2), "nothing", "llama"),
        ("blockwise", MeshShape(fsdp=2), "offload", "every_part"),
        ("ring", RING, "offload", "llama"),
        ("striped", CUBE, "nothing", "every_part"),
        ("striped", CUBE, "tail", "qwen2"),
        ("zigzag", RING, "everything", "every_part"),
        ("zigzag", MeshShape(ring=2, tensor=2), "products", "llama"),
    ],
)
def test_gradients_on_a_mesh_are_those_of_one_device(attention, shape, remat, family):
    run = small_llama.Run(shape, attention, family, remat=remat, **LORA)
    loss, gradients = run.answer()
    wanted_loss, wanted = on_one_device(family)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert_same(gradients, wanted, 1e-5)


@pytest.mark.thorough
def test_an_adapter_adds_only_its_own_products():
    # Of each of 7 matrices and of the head the gradient is not there. An adapter has 2
    # products, and two of each in the backward.
    more = 7 * (2 + 4) - 7 - 1
    assert products("everything", **LORA) == products("everything") + more
    # The second is not kept beside that of the matrix; a layer's last is not needed.
    assert products("products", **LORA) == products("products") + more + 6
