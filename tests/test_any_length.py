"""Rows of any length on a ring: padded by themselves, with the loss of one device."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

import train
from tasks.layout_advice import padding_line
from tasks.text import TextRun
from tests.runs import small_config
from tests.small_llama import Run, assert_same, partition_of
from tools.lib.compiled.pods import aot_pod
from tools.lib.planning.step import Step
from training.feed import place
from training.mesh import MeshShape

SIZES = {
    "model__vocab_size": 0,  # the corpus's
    "model__num_layers": 1,
    "model__hidden_size": 16,
    "model__feed_forward_size": 24,
    "data__batch_rows": 2,
    "feed_forward_chunk_tokens": 2000,
    "loss_chunk_tokens": 2000,
    "remat": "everything",
}
# Attention, devices of the ring, tokens, slots, and what else.
CASES = [
    ("zigzag", 2, 9, 12, {}),
    ("ring", 4, 9, 12, {}),  # the last device has nothing but padding
    ("striped", 4, 9, 16, {"remat": "tail"}),
]
SLOW = [
    ("zigzag", 8, 1000, 1008, {}),
    ("striped", 8, 1001, 1008, {}),
    ("ring", 8, 1001, 1008, {}),
    ("striped", 4, 97, 104, {"remat": "tail"}),
    ("zigzag", 8, 41, 48, {"data__rows": "documents"}),
    ("striped", 4, 97, 108, {"stripe_granule": 9}),
    ("striped", 8, 3, 8, {"mask": "prefix(2)"}),
]


def first_step(corpus: Path, ring: int, attention: str, **fields: Any) -> tuple:
    """Loss, gradients and counts of the first batch; what the step is said to do."""
    fields = SIZES | {"data__corpus": str(corpus)} | fields
    run = Run(MeshShape(ring=ring), attention, **fields)
    task = TextRun(run.config, run.partition)
    run.model = task.model
    batches = TextRun(run.config, run.partition).batches("train")
    batch = place(batches[0], task.sharding, task.shape)
    assert batch.tokens.shape == task.shape == (2, batches.columns)
    step = jax.jit(jax.value_and_grad(task.objective.loss_sum))
    loss, gradients = step(run.parameters, batch)
    tokens, pairs, weights = task.objective.count(batch)
    found = loss / weights, gradients, task.work(float(tokens), float(pairs))
    return *jax.device_get(found), int(tokens), task.shape[1]


@functools.cache
def unpadded(corpus: Path, tokens: int, rows: str, mask: str) -> tuple:
    fields = {"data__context_tokens": tokens, "data__rows": rows, "mask": mask}
    return first_step(corpus, 1, "blockwise", **fields)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "attention, ring, tokens, slots, more",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
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
    assert padding_line(TextRun(config, partition_of(MeshShape(ring=8)))) == ""


@pytest.mark.quick
def test_a_plan_counts_real_tokens_and_holds_padded_ones(corpus, tmp_path):
    fields = {"mesh__fsdp": 1, "mesh__ring": 4, "data__context_tokens": 2045}
    fields |= {"implementation": "", "attention": "zigzag"}
    step = Step.of(small_config(corpus, tmp_path, **fields), aot_pod("v5e:2x2"))
    assert step.run.shape == (4, 2048)
    assert step.work().tokens == 4 * 2045
