"""The five attention systems of the papers: one loss and one gradient.

They differ in what they hold and send: the ring's compiled programs are searched for
collectives that would hold a whole sequence, or more of the keys than they must. Rows
of any length are padded by themselves, and have the loss of one device.
"""

import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

import train
from data.batch import Batch
from tasks import programs
from tasks import run as run_module
from tasks.layout_choice import padding_line
from tasks.text import TextRun
from tests.cases import in_tiers, table
from tests.small.models import Run, assert_same, partition_of
from tests.small.runs import small_config
from tools.lib.compiled.hlo_text import arrays
from tools.lib.compiled.pods import aot_pod
from tools.lib.planning.step import Step
from training.sharding.feed import global_batch
from training.sharding.mesh import MeshShape

MESHES = {
    "vanilla": MeshShape(data=2, fsdp=2, tensor=2),
    "memory_efficient": MeshShape(fsdp=4, tensor=2),
    "blockwise": MeshShape(data=4, tensor=2),
    "ring": MeshShape(fsdp=2, ring=4),
    "striped": MeshShape(fsdp=2, ring=4),
}
RING_SIZE = 4
ROWS = 2  # of each of 2 devices along fsdp
FORWARD_HOPS = 2 * (RING_SIZE - 1)  # keys and values
BACKWARD_HOPS = 2 * RING_SIZE  # their gradients; keys and values travel again
OTHERS = [name for name in MESHES if name != "vanilla"]

CONTEXT_TOKENS = 80
"""No size of the model is a multiple of it, nor of any batch's part of it."""
FIELDS = dict(table("runs.txt", "system")) | {"data__context_tokens": CONTEXT_TOKENS}


class System(Run):
    """A system of the small model, on batches of a corpus."""

    def batch(self, step: int = 0) -> Batch:
        """The global batch of a step, placed."""
        run = self.resolved
        return global_batch(run.batches("train")[step], run.sharding, run.shape)


@pytest.fixture(scope="module")
def systems(corpus):
    """A system by name; each is compiled once, when it is needed."""
    fields = FIELDS | {"data__corpus": str(corpus)}
    return functools.cache(lambda name: System(MESHES[name], name, **fields))


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_loss_and_gradients_are_vanillas(systems, name):
    loss, gradients = systems(name).answer()
    true_loss, true_gradients = systems("vanilla").answer()
    assert loss == pytest.approx(true_loss, rel=1e-6)
    assert_same(gradients, true_gradients, 1e-6)


# Collectives of a compiled program: kind, and the shape of each result.
COLLECTIVE = re.compile(
    r"= (?P<results>.*?) (?P<kind>all-gather|all-to-all|all-reduce|reduce-scatter|"
    r"collective-permute|collective-broadcast|ragged-all-to-all)(-start)?\("
)


def collectives(compiled: jax.stages.Compiled) -> Counter:
    """How often each (kind, type, shape) is the result of a collective."""
    matches = filter(None, map(COLLECTIVE.search, compiled.as_text().splitlines()))
    found = ((match["kind"], arrays(match["results"])) for match in matches)
    return Counter((kind, x.dtype, x.sizes) for kind, results in found for x in results)


@pytest.mark.thorough
def test_keys_and_values_travel_with_their_own_heads_and_no_hop_too_far(systems):
    """No collective of a ring holds a whole sequence, and nothing puts striped tokens
    back into order: another one would take collectives, or gathers."""
    ring, striped = systems("ring"), systems("striped")
    found = collectives(ring.program)
    assert "all-gather" in {kind for kind, *_ in found}
    # Collectives with as many tokens along an axis as a row, or rows, have.
    assert not [k for k in found if any(s and s % CONTEXT_TOKENS == 0 for s in k[2])]
    permute = "collective-permute"
    shard = (ROWS, 2, CONTEXT_TOKENS // RING_SIZE, 8)  # 2 of the 4 heads are K heads
    # Layers are scanned, so the program has each hop of a layer once.
    hops = {key: times for key, times in found.items() if key[0] == permute}
    assert hops == {(permute, "f32", shard): 2 * FORWARD_HOPS + BACKWARD_HOPS}
    assert collectives(striped.program) == found
    for operation in ("gather", "sort", "scatter", "transpose", "dynamic_slice"):
        pattern = rf"stablehlo\.{operation}\b"
        both = [len(re.findall(pattern, s.lowered.as_text())) for s in (ring, striped)]
        assert both[0] == both[1], operation


SHORT = dict(table("runs.txt", "short"))


def first_step(corpus: Path, ring: int, attention: str, **fields: Any) -> tuple:
    """Loss, gradients and counts of the first batch; what the step is said to do."""
    fields = SHORT | {"data__corpus": str(corpus)} | fields
    run = Run(MeshShape(ring=ring), attention, **fields)
    task = run.resolved
    batches = task.batches("train")
    batch = global_batch(batches[0], task.sharding, task.shape)
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
    "attention, ring, tokens, slots, more", in_tiers("runs.txt", "length")
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


def test_programs_have_the_settings_of_the_config(monkeypatch):
    """Microbatches give the same numbers, and no test waits for a spike."""
    step = mock.Mock(return_value=lambda state, batch: (state, state.step))
    replay = mock.Mock(return_value=lambda params, batch: batch)
    monkeypatch.setattr(run_module, "make_train_step", step)
    monkeypatch.setattr(programs, "make_replay", replay)
    fields = {"train__microbatches": 2, "train__validation_batches": 0}
    fields |= {"guard__replay": True, "guard__spike_sigmas": 6.0}
    programs.compile_programs(Run(MeshShape(), "vanilla", **fields).resolved, {})
    made = step.call_args.kwargs, replay.call_args.kwargs
    assert [options["microbatches"] for options in made] == [2, 2]
    assert made[0]["spike_sigmas"] == 6
