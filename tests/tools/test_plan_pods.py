"""Plans of models on whole pods, and of the agents of Ring Attention's table 5."""

import math

import pytest

from tools.lib.compiled.pods import TooLarge, aot_pod
from tools.lib.planning.memory import SPARE_SHARE, peak_bytes
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
    assert (plan.device_kind, plan.implementation) == ("NVIDIA H200", "hopper")
    layers = config.model.num_layers
    assert plan.transfers.hidden == layers * (4 * 3 + 2 * 4)
    assert plan.transfers.kernels == layers * (2 * 4 + 1)
    assert plan.transfers.exposed == 0
    # Once a pass, of which each device sends three quarters.
    (gathered,) = (c.bytes_sent for c in plan.collectives if c.name == "all-gather")
    whole = 4 * plan.memory.parameters // 2
    assert gathered <= 2 * whole * 3 / 4


def agent_step(system: str, trajectories: int) -> Step:
    """On one v5e or a ring of 8."""
    name, pod = f"configs/exorl_at.py:{trajectories}", aot_pod("v5e:2x4")
    devices = 8 if system in ("ring", "striped") else 1
    flags = f"--config.attention={system}", f"--config.mesh.ring={devices}"
    return Step.of(read_config([f"--config={name}", *flags]), pod.first(devices))


@pytest.mark.parametrize(("system", "devices"), [("striped", 8), ("blockwise", 1)])
def test_agents_are_planned_by_their_task(system, devices):
    step = agent_step(system, 32)
    assert step.run.num_parameters == 303_503_366
    assert math.prod(step.run.partition.sizes.values()) == devices
    layers, tokens = 24, 128_000
    products = layers * (4 * 1024**2 + 3 * 1024 * 2736)
    pairs = tokens * (tokens + 1) / 2
    model_flops = 6 * products * tokens + 12 * layers * 1024 * pairs
    assert step.work().model_flops == pytest.approx(model_flops)


@pytest.mark.slow
@pytest.mark.timeout(600)  # eight ring steps of either pass are compiled
@pytest.mark.parametrize(("system", "gib"), [("blockwise", 13.44), ("striped", 2.05)])
def test_blockwise_attention_and_a_ring_of_8_hold_32_trajectories(system, gib):
    memory = agent_step(system, 32).compile().memory_analysis()
    assert peak_bytes(memory) / 2**30 == pytest.approx(gib, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "trajectories"),
    [("vanilla", 32), ("memory_efficient", 32), ("blockwise", 128)],
)
def test_larger_agents_are_refused(system, trajectories):
    with pytest.raises(TooLarge, match="does not fit: it takes"):
        agent_step(system, trajectories).compile()
