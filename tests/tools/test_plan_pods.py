"""Plans of whole models on whole pods: memory, and transfers hidden."""

import pytest

from tools.lib.compiled.pods import aot_pod
from tools.lib.planning.memory import SPARE_SHARE
from tools.lib.planning.plan import Plan
from tools.lib.planning.step import Step
from tools.plan_pod import read_config


def plan_7b(topology: str, *flags: str) -> Plan:
    more = "--config.data.context_tokens=8388608", "--config.remat=nothing"
    config = read_config(["--config=configs/tpuv4_7b.py", *more, *flags])
    return Plan.of(Step.of(config, aot_pod(topology)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_7b_step_fits_a_v4_pod_with_all_hops_hidden():
    plan = plan_7b("v4:8x8x8")
    assert plan.memory.saved == 32 * 16384 * 4096 * 2
    assert plan.memory.peak < 12 * 2**30
    # Two rings forward and one backward, of 511 steps, for each part of each layer: of
    # two arrays of two pieces forward, and of four backward, whose gradients come home.
    rings = 32 * plan.attention_parts
    assert plan.transfers.hidden == rings * 2 * (511 * (2 + 2 + 4) + 512 * 4)
    assert plan.transfers.exposed == 0
    assert 0.5 < plan.estimate.mfu < 0.67


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_ring_hides_where_the_scheduler_finds_the_memory_too_small():
    plan = plan_7b("v3:16x16", "--config.attention_parts=4")
    assert plan.memory.peak < 9 * 2**30
    assert plan.transfers.hidden > 0 and plan.transfers.exposed == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_8b", "gemma3_12b"])
def test_families_fit_the_smallest_chips_and_wait_for_no_ring(name):
    """Nor in layers with a window, whose kernels are short."""
    config = read_config([f"--config=configs/models.py:{name}/v6e"])
    plan = Plan.of(Step.of(config, aot_pod("v6e:8x8")))
    assert plan.memory.spare_share > SPARE_SHARE
    assert plan.transfers.exposed == 0
    assert plan.estimate.ring_waits == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_on_gpus_hides_its_ring_and_gathers_parameters_in_bfloat16():
    """With shards so large that XLA sends keys and values apart."""
    config = read_config(["--config=configs/h200_1b.py", "--config.mesh.ring=4"])
    plan = Plan.of(Step.of(config, aot_pod("h200:1x1x4")))
    assert plan.transfers.hidden == config.model.num_layers * (4 * 3 + 2 * 4)
    assert plan.transfers.exposed == 0
    # Once a pass, of which each device sends three quarters.
    (gathered,) = (c.bytes_sent for c in plan.collectives if c.name == "all-gather")
    whole = 4 * plan.memory.parameters // 2
    assert gathered <= 2 * whole * 3 / 4
