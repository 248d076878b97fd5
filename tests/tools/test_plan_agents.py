"""Plans of the agents of Ring Attention's table 5, on v5e."""

import math

import pytest

from tools.lib.compiled.pods import TooLarge, aot_pod
from tools.lib.planning.memory import peak_bytes
from tools.lib.planning.step import Step
from tools.plan_pod import read_config


def agent_step(system: str, trajectories: int) -> Step:
    """The step of a context of Ring Attention's table 5, on one v5e or a ring of 8."""
    name, pod = f"configs/exorl_at.py:{trajectories}", aot_pod("v5e:2x4")
    devices = 8 if system in ("ring", "striped") else 1
    flags = [f"--config.attention={system}", f"--config.mesh.ring={devices}"]
    return Step.of(read_config([f"--config={name}", *flags]), pod.first(devices))


@pytest.mark.parametrize(("system", "devices"), [("striped", 8), ("blockwise", 1)])
def test_agents_are_planned_by_their_task(system, devices):
    step = agent_step(system, 32)
    assert step.run.num_parameters == 303_503_366
    assert math.prod(step.run.partition.sizes.values()) == devices
    layers, tokens = 24, 128_000
    products = layers * 4 * 1024**2 + layers * 3 * 1024 * 2736
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
