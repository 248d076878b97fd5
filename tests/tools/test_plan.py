"""Plans of a small model on AOT topologies of TPUs, against what its sizes say."""

import dataclasses
import json
import math
import re
from unittest import mock

import jax
import ml_collections
import pytest

from kernels.devices import chips
from models.flops import num_matrix_parameters, paper_train_flops, train_flops
from models.sizes import LanguageModelConfig
from tasks.layout_choice import typical_rows
from tools import plan_pod
from tools.lib.compiled import pods
from tools.lib.compiled.hlo import TRANSFER, Program
from tools.lib.compiled.pods import TooLarge, aot_pod
from tools.lib.planning.plan import Plan
from tools.lib.planning.roofline import Roofline
from tools.lib.planning.step import TOLERANCE, Step, peak_bytes
from tools.lib.planning.text import describe
from tools.plan_pod import read_config

SIZES = {"vocab_size": 512, "hidden_size": 256, "feed_forward_size": 512}
SIZES |= {"num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 128}
MODEL = LanguageModelConfig(**SIZES)
CONTEXT, RING, LAYERS = 2048, 4, MODEL.num_layers
TOKENS = CONTEXT // RING
KEYS_BYTES = TOKENS * MODEL.num_kv_heads * MODEL.head_dim * 2
NORMS = (2 * LAYERS + 1) * MODEL.hidden_size  # on every device
MATRICES = num_matrix_parameters(MODEL) + MODEL.vocab_size * MODEL.hidden_size
PARAMETERS_BYTES = 4 * (MATRICES // RING + NORMS)


def small_config() -> ml_collections.ConfigDict:
    """A small model on one ring."""
    fields = {f"model.{name}": size for name, size in SIZES.items()}
    fields |= {"compute_dtype": "bfloat16", "mesh.fsdp": 1, "mesh.ring": RING}
    fields |= {"data.context_tokens": CONTEXT, "data.batch_rows": 1}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    return read_config(["--config=configs/tiny.py", *arguments])


@pytest.fixture(scope="module")
def step() -> Step:
    return Step.of(small_config(), aot_pod("v5e:2x2"))


@pytest.fixture(scope="module")
def compiled(step) -> jax.stages.Compiled:
    return step.compile()


@pytest.fixture(scope="module")
def plan(step, compiled) -> Plan:
    with mock.patch.object(Step, "compile", lambda step: compiled):
        return Plan.of(step)


@pytest.mark.thorough
def test_parts_of_the_memory_are_those_of_the_sizes_and_add_up(plan):
    memory = plan.memory
    assert memory.parameters == PARAMETERS_BYTES
    # Two moments of each parameter, and the numbers of updates made.
    assert 0 < memory.optimizer_state - 2 * memory.parameters <= 8
    # Inputs of the layers and results of attention.
    kept = MODEL.hidden_size * 2 + MODEL.num_heads * (MODEL.head_dim * 2 + 4)
    assert memory.saved == LAYERS * TOKENS * kept
    parts = memory.parameters, memory.optimizer_state, memory.saved, memory.workspace
    assert sum(parts) == memory.peak and memory.workspace > 0
    assert (memory.capacity, memory.host) == (16 * 2**30, 0)


@pytest.mark.thorough
def test_all_transfers_hide_behind_kernels(plan):
    sent = RING - 1
    (found,) = (k for k in plan.collectives if k.name == TRANSFER)
    # A half of the heads goes each way: keys and values there and back again for the
    # backward pass, their gradients with them, and home.
    assert plan.ways == 2
    assert found.count == LAYERS * 2 * (2 * sent + 2 * sent + 2 * RING)
    assert found.bytes_sent == LAYERS * (sent * (2 + 2) + RING * 2 * 2) * KEYS_BYTES
    assert (found.exposed_bytes, plan.hidden_share) == (0, 1)
    # Each half has its own kernel in each step, and one more before it is home.
    assert plan.kernels == LAYERS * 2 * (RING + RING + 1)


@pytest.mark.thorough
def test_collectives_hold_the_gathers_of_parameters(plan):
    # Each matrix is gathered in bfloat16 at least once forward and once backward.
    gathers = (k.bytes_sent for k in plan.collectives if k.name.startswith("all-"))
    assert sum(gathers) >= 2 * 2 * 0.7 * MATRICES * (RING - 1) / RING
    assert plan.unknown_loops == 0


@pytest.mark.thorough
def test_work_and_estimate_are_of_one_causal_document(plan):
    pairs = CONTEXT * (CONTEXT + 1) / 2
    assert plan.work.model_flops == train_flops(MODEL, CONTEXT, pairs)
    assert plan.work.paper_flops == paper_train_flops(MODEL, 1, CONTEXT)
    mfu = plan.work.model_flops / (plan.estimate.step * 4 * 197e12)
    assert plan.estimate.mfu == pytest.approx(mfu) and mfu < 1
    for part in ("products", "elementwise", "small", "step"):
        assert getattr(plan.at_cycles, part) > getattr(plan.estimate, part) > 0
    assert plan.at_cycles.attention == plan.estimate.attention
    assert plan.with_stalls is None  # nobody measured a v5e's


@pytest.mark.thorough
def test_measured_stalls_lengthen_attention_alone(step, compiled, plan, monkeypatch):
    monkeypatch.setitem(chips.STALLS, "TPU v5e", {"forward": (1.5, 10_000, 5_000)})
    with mock.patch.object(Step, "compile", lambda step: compiled):
        stalled = Plan.of(step).with_stalls
    before = plan.at_cycles
    assert stalled.attention > 1.5 * before.attention
    assert (stalled.products, stalled.small) == (before.products, before.small)
    assert "stalls as others' kernels have them; bundles" in stalled.assumption
    assert "stalls" not in before.assumption


@pytest.mark.thorough
def test_packed_documents_are_less_work_in_the_same_program(step, compiled, plan):
    documents = (CONTEXT // 4,)
    rows = typical_rows(step.run.config, documents)
    run = dataclasses.replace(step.run, given_rows=rows)
    packed = dataclasses.replace(step, run=run, documents=documents)
    with mock.patch.object(Step, "compile", lambda step: compiled):
        packed = Plan.of(packed)
    pairs = 4 * (CONTEXT // 4) * (CONTEXT // 4 + 1) / 2
    assert packed.work.model_flops == train_flops(MODEL, CONTEXT, pairs)
    assert packed.work.model_flops < plan.work.model_flops
    # A shard is one tile, a diagonal for one document, a loop over pieces for several.
    assert packed.estimate.attention != plan.estimate.attention
    assert packed.estimate.products == plan.estimate.products


@pytest.mark.thorough
def test_instructions_make_the_flops_of_the_sizes_and_those_of_rematerialisation(
    step, compiled, plan
):
    text = compiled.as_text()
    program = Program.parse(text, RING)
    endless = dataclasses.replace(step.pod.chip, hbm_bytes_per_second=math.inf)
    work = Roofline(program, endless, {}).total
    layer = 4 * MODEL.hidden_size**2 + 3 * MODEL.hidden_size * MODEL.feed_forward_size
    head = MODEL.hidden_size * MODEL.vocab_size
    flops = 2 * TOKENS * 3 * (LAYERS * layer + head)
    assert work.products * endless.peak_flops == pytest.approx(flops)
    # The layers' last product is of no use to the backward.
    again = layer - MODEL.hidden_size * MODEL.feed_forward_size
    flops = 2 * TOKENS * LAYERS * again
    assert work.recomputed * endless.peak_flops == pytest.approx(flops)
    # These arrays are small: their memory takes longer than their products.
    assert plan.estimate.products >= work.products
    assert plan.estimate.recomputed >= work.recomputed
    parameters = plan.memory.parameters + plan.memory.optimizer_state
    others = plan.estimate.elementwise + plan.estimate.small
    assert others > 2 * parameters / 819e9  # the optimizer alone


@pytest.mark.thorough
def test_plan_is_written_as_json(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Plan, "of", classmethod(lambda cls, step, phase: plan))
    output = tmp_path / "plan.json"
    arguments = ["--config=configs/tiny.py", "--config.mesh.fsdp=1"]
    arguments.append("--topology=v5e:2x2")
    plan_pod.main([*arguments, "--output", str(output)])
    said = capsys.readouterr()
    assert said.err.startswith("compiling a step of 4 x 512 tokens for 4 x TPU v5 ")
    described = "\n".join([*describe(plan), ""])
    layout = said.out.removeprefix(described)
    assert said.out != layout and layout.startswith("layout: striped 1 takes ")
    row = json.loads(output.read_text())
    assert row.pop("environment")["device_kind"]
    expected = dataclasses.asdict(plan)
    expected["memory"]["spare_share"] = plan.memory.spare_share
    for name, found in (("estimate", plan.estimate), ("at_cycles", plan.at_cycles)):
        expected[name]["step"] = found.step
    assert row == json.loads(json.dumps(expected))


def search(plan, monkeypatch, bytes_a_token):
    """Searches with a memory that is a line in the context."""

    def of(cls, step, phase):
        peak = 2**30 + bytes_a_token * step.run.config.data.context_tokens
        if peak > 17 * 2**30:
            raise TooLarge("the step does not fit: it takes too much")
        memory = dataclasses.replace(plan.memory, peak=peak)
        columns = step.run.config.data.context_tokens
        return dataclasses.replace(plan, memory=memory, context_tokens=columns)

    monkeypatch.setattr(Plan, "of", classmethod(of))
    arguments = ["--config=configs/tiny.py", "--config.mesh.fsdp=1"]
    plan_pod.main([*arguments, "--topology=v5e:2x2", "--find-max-context"])


@pytest.mark.thorough
def test_longest_context_leaves_a_twentieth_and_every_try_is_told(
    plan, monkeypatch, capsys
):
    search(plan, monkeypatch, bytes_a_token=50_000)
    printed = capsys.readouterr().out
    longest = (0.95 * 16 * 2**30 - 2**30) / 50_000
    found = re.search(r"longest context that leaves 5%: ([\d,]+) tokens", printed)
    context = int(found[1].replace(",", ""))
    assert context <= longest <= context * (1 + TOLERANCE) + 1024
    assert context % (RING * 256) == 0
    assert f", to within {int(TOLERANCE * context):,}\n" in printed
    assert f"step: 1 x {context:,} tokens" in printed
    search(plan, monkeypatch, bytes_a_token=2**30)
    assert "no context fits, down to 1024 tokens" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_step_that_does_not_fit_says_by_how_much(monkeypatch):
    step = Step.of(small_config(), aot_pod("v5e:2x2"))

    def refuse(*arguments: object) -> None:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (16.43G) exceeds available HBM (15.75G)."
        )

    monkeypatch.setattr(pods, "compile_for", refuse)
    with pytest.raises(TooLarge, match=r"does not fit: it takes 16\.43G of 15\.75G"):
        step.compile()


def test_a_total_that_the_compiler_does_not_tell_is_all_that_it_names():
    class Stats:
        argument_size_in_bytes = 100
        output_size_in_bytes = 90
        alias_size_in_bytes = 80
        temp_size_in_bytes = 7

    assert peak_bytes(Stats()) == 117
    Stats.total_allocation_bytes = 112
    assert peak_bytes(Stats()) == 112
