"""Rows of any length on a ring: padded by themselves, with the loss of one device."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import train
from tasks import batch_rows, text
from tests.cases.attention import QUICK
from tests.runs import small_config
from tests.small_agent import drawn
from tests.small_llama import assert_same, partition_of
from tools.lib.compiled.pods import aot_pod
from tools.lib.planning.step import Step
from training.feed import place
from training.mesh import MeshShape

SIZES = {
    "model__num_layers": 1,
    "model__hidden_size": 16,
    "model__feed_forward_size": 24,
    "data__batch_rows": 2,
    "simulated_devices": 0,
    "feed_forward_chunk_tokens": 2000,
    "loss_chunk_tokens": 2000,
    "implementation": "reference",
    "remat": "everything",
}
# Attention, devices of the ring, tokens, slots, and what else.
CASES = [
    ("zigzag", 8, 1000, 1008, {}),
    ("ring", 8, 41, 48, {}),  # the last device has nothing but padding
    ("striped", 4, 97, 104, {"remat": "tail"}),
]
MORE = [
    ("striped", 8, 1001, 1008, {}),
    ("ring", 8, 1001, 1008, {}),
    ("zigzag", 8, 41, 48, {"data__rows": "documents"}),
    ("striped", 4, 97, 108, {"stripe_granule": 9}),
    ("striped", 8, 3, 8, {"mask": "prefix(2)"}),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


def first_step(corpus: Path, ring: int, attention: str, **fields: Any) -> tuple:
    """Loss, gradients and counts of the first batch; what the step is said to do."""
    config = small_config(corpus, Path("none"), attention=attention, **SIZES | fields)
    config.mesh.update(data=1, fsdp=1, ring=ring, tensor=1)
    partition = partition_of(MeshShape(ring=ring))
    task = text.make(config, partition)
    parameters = drawn(task.model, partition)
    step = jax.value_and_grad(task.objective.loss_sum)
    batches = text.batches(config, partition, "train")
    batch = place(batches[0], task.sharding, task.shape)
    assert batch.tokens.shape == task.shape == (2, batches.columns)
    loss, gradients = jax.jit(step, compiler_options=QUICK)(parameters, batch)
    tokens, pairs, weights = task.objective.count(batch)
    found = loss / weights, gradients, task.work(float(tokens), float(pairs))
    return *jax.device_get(found), int(tokens), task.shape[1]


@functools.cache
def unpadded(corpus: Path, tokens: int, rows: str, mask: str) -> tuple:
    fields = {"data__context_tokens": tokens, "data__rows": rows, "mask": mask}
    return first_step(corpus, 1, "blockwise", **fields)


@pytest.mark.thorough
@pytest.mark.parametrize(("attention", "ring", "tokens", "slots", "more"), CASES)
def test_a_padded_row_has_the_loss_gradients_and_work_of_one_device(
    corpus, attention, ring, tokens, slots, more
):
    rows, mask = more.get("data__rows", "packed"), more.get("mask", "causal")
    true_loss, true_gradients, *truth, whole = unpadded(corpus, tokens, rows, mask)
    found = first_step(corpus, ring, attention, data__context_tokens=tokens, **more)
    loss, gradients, *work, padded = found
    assert (whole, padded) == (tokens, slots)
    assert loss == pytest.approx(true_loss, rel=1e-6)
    assert_same(gradients, true_gradients, 2e-6)
    assert work == truth and work[1] <= 2 * tokens


@pytest.mark.quick
def test_what_padding_costs_is_said_before_anything_is_compiled(corpus, tmp_path):
    said: list[str] = []
    error = AssertionError("compiled")
    with mock.patch.object(jax, "jit", side_effect=error), pytest.raises(type(error)):
        fields = {"attention": "zigzag", "data__context_tokens": 77}
        train.train(small_config(corpus, tmp_path, **fields), said.append)
    (line,) = (line for line in said if line.startswith("rows: "))
    assert line == (
        "rows: of 77 tokens, padded to 80 for Zigzag() on a ring of 4: 3.75% of their "
        "slots are empty"
    )
    config = small_config(corpus, tmp_path)
    assert batch_rows.describe_padding(config, partition_of(MeshShape(ring=8))) == ""


def test_steps_read_the_same_tokens_however_they_are_padded(corpus, tmp_path):
    def tokens(attention: str, ring: int) -> list[np.ndarray]:
        fields = {"attention": attention, "data__context_tokens": 37}
        config = small_config(corpus, tmp_path, **fields)
        batches = text.batches(config, partition_of(MeshShape(ring=ring)), "train")
        read = []
        for step in range(3):
            blocks = batches[step].values()
            parts = [block.tokens[block.k_start < block.k_end] for block in blocks]
            read.append(np.sort(np.concatenate(parts)))
        return read

    for one, other in zip(tokens("striped", 8), tokens("blockwise", 1), strict=True):
        assert one.size == 4 * 37
        np.testing.assert_array_equal(one, other)


@pytest.mark.quick
def test_a_plan_counts_real_tokens_and_holds_padded_ones(corpus, tmp_path):
    fields = {"mesh__fsdp": 1, "mesh__ring": 4, "data__context_tokens": 2045}
    fields |= {"implementation": "", "attention": "zigzag"}
    step = Step.of(small_config(corpus, tmp_path, **fields), aot_pod("v5e:2x2"))
    assert step.task.shape == (4, 2048)
    assert step.work().tokens == 4 * 2045
