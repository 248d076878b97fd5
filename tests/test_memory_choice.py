"""remat=auto: what it chooses by the memory that is left, and that a run keeps it."""

import contextlib
import dataclasses
from unittest import mock

import pytest

from kernels.devices import chips
from models.memory import KEEP_PRODUCTS
from tasks import run_config
from tasks.memory_choice import MARGIN, choice_line, estimated_bytes
from tasks.task import make_run
from tests.cases import table
from tests.small.runs import Run
from tools.plan_pod import read_config
from training.sharding.mesh import MeshShape, Partition


def run_of(kind, fsdp, ring, tokens, **fields):
    """8B, a row of as many tokens for each of fsdp."""
    fields = {"remat": "auto", "attention": "striped"} | fields
    fields |= {"data.context_tokens": tokens, "data.batch_rows": fsdp}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    config = read_config(["--config=configs/models.py:llama3_8b/v5p", *flags])
    mesh = MeshShape(fsdp=fsdp, ring=ring).abstract_mesh(kind)
    return make_run(config, Partition(mesh))


@pytest.mark.parametrize("where, remat, gib", table("models.txt", "auto"))
def test_layers_keep_what_memory_is_left_for(where, remat, gib):
    run = run_of(*where)
    assert (run.config.remat, run.config.remat_budget_gib) == (remat, gib)
    assert choice_line(run) == choice_line(run_of(*where))
    assert f"--config.remat={remat}" in choice_line(run)
    if (chip := chips.find(where[0])) and (gib or remat in KEEP_PRODUCTS):
        limit = (1 - MARGIN) * chip.hbm_bytes
        (policy, _), *_ = run.execution.runs(32)
        rungs = run.kept.rungs(policy)
        assert estimated_bytes(run) <= limit
        # A layer that keeps more would be too much.
        assert not rungs or estimated_bytes(run) + 1.1 * rungs[0] > limit


def test_a_remat_that_is_named_stays():
    assert run_of("TPU v5", 1, 64, 2**16, remat="nothing").config.remat == "nothing"


@contextlib.contextmanager
def memory(gib):
    """Has devices of this memory, or of an unknown one."""
    chip = gib and dataclasses.replace(chips.CHIPS[0], hbm_bytes=int(gib * 2**30))
    with mock.patch("tasks.memory_choice.chips") as table_of_chips:
        table_of_chips.find.return_value = chip
        yield


@pytest.mark.thorough
def test_a_run_keeps_its_first_choice_and_has_the_loss_of_a_named_one(corpus, tmp_path):
    fields = {"train__steps": 2, "train__validation_batches": 0, "metrics": ()}
    fields |= {"optimizer__warmup_steps": 0}
    named = Run(corpus, tmp_path / "named", remat="attention", **fields)
    run = Run(corpus, tmp_path / "auto", remat="auto", **fields)
    with memory(1):
        loss = run.train()["loss"]
    assert loss == pytest.approx(named.train()["loss"], rel=1e-6)
    assert run_config.read(str(run.workdir)).remat == "gathered"
    for gib, remat in ((None, "gathered"), (0.1, "gathered"), (1e-4, "nothing")):
        run.said.clear()
        with memory(gib):
            run.train()
        assert any(f"auto is --config.remat={remat}" in line for line in run.said)
        is_changed = "changed since step 2: remat: gathered -> nothing" in run.said
        assert is_changed == (remat == "nothing")
