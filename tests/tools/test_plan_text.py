"""Tables of plans, the search for the longest context, plans on whole pods."""

import contextlib
import dataclasses
import math
import re
from unittest import mock

import pytest

from tasks.memory_choice import SPARE_SHARE
from tools.lib.compiled.pods import TooLarge, aot_pod
from tools.lib.planning import phases
from tools.lib.planning.estimate import Estimate
from tools.lib.planning.meshes import Suggestion
from tools.lib.planning.plan import Kind, Plan
from tools.lib.planning.step import (
    TOLERANCE,
    Memory,
    Step,
    longest_context,
    peak_bytes,
)
from tools.lib.planning.text import answer, describe, seconds
from tools.plan_pod import read_config
from training.reports.metrics import StepWork

GIB = 2**30
RING = Kind("collective-permute", 523_520, 523_520 * 40 * 2**20, 0, 0)
REDUCED = Kind("all-reduce", 644, 80 * GIB, 80 * GIB, 80 * GIB)
GATHERED = Kind("all-gather", 192, 24 * GIB, 16 * GIB, 4 * GIB)
PLAN = Plan(
    topology="v3:16x16",
    device_kind="TPU v3",
    devices=512,
    mesh={"data": 1, "fsdp": 1, "ring": 512, "tensor": 1},
    rows=1,
    context_tokens=8_388_608,
    remat="nothing",
    execution="remat nothing, feed-forward of 4,096 tokens at a time",
    attention_parts=4,
    implementation="pallas_tpu",
    memory=Memory(GIB, 2 * GIB, 3 * GIB, GIB // 2, 13 * GIB // 2, 16 * GIB, 0),
    kernels=196_736,
    ways=1,
    collectives=(RING, REDUCED, GATHERED),
    unknown_loops=0,
    work=StepWork(8_388_608, 5.5e19, 1.1e20),
    estimate=Estimate(
        4958.2, 18.7, 6.3, 500.0, 0.031, 21.25, 0.519, 1234, 0.355, "some"
    ),
    at_cycles=Estimate(4958.2, 22.3, 8.2, 990.0, 20.3, 30.5, 0.5, 1234, 0.321, "some"),
    compile_seconds=52.4,
    planner_bytes=3 * GIB,
)


def cells(plan: Plan) -> list[list[str]]:
    """Of the lines that have columns."""
    return [re.split(r"\s{2,}", line.strip()) for line in describe(plan)]


def row(plan: Plan, name: str) -> list[str]:
    (found,) = (line for line in cells(plan) if line[0] == name)
    return found[1:]


def test_tables_have_the_plans_memory_and_what_a_device_costs():
    steps = PLAN.estimate.step, PLAN.at_cycles.step
    rates = [PLAN.context_tokens / step for step in steps]
    hours = [1e9 / rate * PLAN.devices / 3600 for rate in rates]
    small = row(PLAN, "small instructions, 1,234")
    assert small == ["31 ms", "0.0%", "20.3 s", "0.3%"]
    for name, shown in (
        ("parameters", "1.00 GiB"),
        ("optimizer state", "2.00 GiB"),
        ("saved by layers (formula of what remat keeps)", "3.00 GiB"),
        ("workspace (the rest)", "512.00 MiB"),
        ("peak (all of these)", "6.50 GiB"),
        ("of the device", "16.00 GiB"),
        ("spare", "59.4%"),
    ):
        assert row(PLAN, name) == [shown]
    assert row(PLAN, "tokens a second") == [f"{rate:,.0f}" for rate in rates]
    found = row(PLAN, "device-hours for 1e9 tokens")
    assert found == [f"{each:,.1f}" for each in hours]
    alone = dataclasses.replace(PLAN, at_cycles=PLAN.estimate)  # XLA counts no cycles
    assert (row(PLAN, "MFU"), row(alone, "MFU")) == (["35.5%", "32.1%"], ["35.5%"])
    stalled = dataclasses.replace(PLAN.at_cycles, assumption="some stalls")
    stalls = dataclasses.replace(PLAN, with_stalls=stalled)
    assert row(stalls, "MFU") == ["35.5%", "32.1%", "32.1%"]
    assert describe(stalls)[-1] == "assuming some stalls"
    memory = dataclasses.replace(PLAN.memory, peak=15.5 * GIB, host=GIB)
    plan = dataclasses.replace(PLAN, memory=memory, unknown_loops=3)
    assert row(plan, "spare") == ["3.1%, below 5%"]
    assert row(plan, "memory of the host, for each device") == ["1.00 GiB"]
    assert row(plan, "3 loops of unknown length counted once") == []
    shown = [seconds(count) for count in (1.95e-5, 2.52e-4, 0.0252, 2.52)]
    assert shown == ["19.5 us", "252 us", "25.2 ms", "2.52 s"]


# The search for the longest context, on memory that a function makes up.

LIMIT = 1000.0


PEAKS = [
    (first, lambda context, fixed=fixed: fixed + math.ceil(context / 40), 6)
    for fixed in (0, 400, 900)
    for first in (256, 1024, 40_000, 10_000_000)
]
PEAKS.append((100_000, lambda n: None if n > 20_000 else n // 40, 10))
PEAKS += [
    (1024, lambda context, step=step: 300 + -(-context // step) * step // 50, 12)
    for step in (300, 700, 1500, 3100, 4900)
]


@pytest.mark.parametrize(("first", "peak_of", "most"), PEAKS)
def test_the_longest_context_takes_few_tries_from_anywhere(first, peak_of, most):
    """Of memory on a line, where the compiler refuses, and with jumps."""
    tries, unit, longest = mock.Mock(side_effect=peak_of), 256, 0
    best = longest_context(tries, first, unit, LIMIT)
    # Against trying everything up to the first that does not fit.
    while (peak := peak_of(longest + unit)) is not None and peak <= LIMIT:
        longest += unit
    assert best <= longest <= best + max(unit, TOLERANCE * longest)
    assert tries.call_count <= most


# Plans of models on whole pods, and of the agents of Ring Attention's table 5.


def plan_7b(topology: str, *flags: str) -> Plan:
    more = "--config.data.context_tokens=8388608", "--config.remat=nothing"
    config = read_config(["--config=configs/tpuv4_7b.py", *more, *flags])
    return Plan.of(Step.of(config, aot_pod(topology)))


def sent(plan: Plan) -> Kind:
    """The transfers of its rings."""
    (found,) = (kind for kind in plan.collectives if kind.name == RING.name)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_7b_step_fits_a_v4_pod_with_all_hops_hidden():
    plan = plan_7b("v4:8x8x8")
    assert plan.memory.saved == 32 * 16384 * 4096 * 2
    assert plan.memory.peak < 12 * 2**30
    # Two rings forward and one backward, of 511 steps, for each part of each layer: of
    # two arrays of two pieces forward, and of four backward, whose gradients come home.
    rings = 32 * plan.attention_parts
    assert sent(plan).count == rings * 2 * (511 * (2 + 2 + 4) + 512 * 4)
    assert sent(plan).exposed_bytes == 0
    assert 0.5 < plan.estimate.mfu < 0.67


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_ring_hides_where_the_scheduler_finds_the_memory_too_small():
    plan = plan_7b("v3:16x16", "--config.attention_parts=4")
    assert plan.memory.peak < 9 * 2**30
    assert sent(plan).exposed_bytes == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_8b", "gemma3_12b"])
def test_families_fit_the_smallest_chips_and_wait_for_no_ring(name):
    """Nor in layers with a window, whose kernels are short."""
    config = read_config([f"--config=configs/models.py:{name}/v6e"])
    plan = Plan.of(Step.of(config, aot_pod("v6e:8x8")))
    assert plan.memory.spare_share > SPARE_SHARE
    assert sent(plan).exposed_bytes == 0
    assert plan.estimate.ring_waits == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_on_gpus_hides_its_ring_and_gathers_parameters_in_bfloat16():
    """With shards so large that XLA sends keys and values apart."""
    config = read_config(["--config=configs/h200_1b.py", "--config.mesh.ring=4"])
    plan = Plan.of(Step.of(config, aot_pod("h200:1x4")))
    assert (plan.device_kind, plan.implementation) == ("NVIDIA H200", "hopper")
    layers = config.model.num_layers
    assert sent(plan).count == layers * (4 * 3 + 2 * 4)
    assert plan.kernels == layers * (2 * 4 + 1)
    assert sent(plan).exposed_bytes == 0
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


def suggested(fits: bool, memory: float, **mesh: int) -> Suggestion:
    times = {"attention": 2.0, "ring_waits": 0.0, "other_waits": 0.5, "products": 1.5}
    names = {"layout": "zigzag", "route": "one way", "remat": "--config.remat=products"}
    return Suggestion(mesh, memory * GIB, fits, **names, **times)


def test_a_suggestion_says_whether_it_fits_how_fast_and_with_which_flags():
    config = read_config(["--config=configs/tiny.py", "--config.mesh.fsdp=1"])
    config.mesh.ring = -1
    config.data.update(batch_rows=2, context_tokens=8192)
    chip = mock.Mock(hbm_bytes=16 * GIB)
    best = suggested(True, 11.64, ring=32, tensor=2)
    assert answer([best, suggested(True, 5, ring=64)], chip, config) == (
        "fits: 11.6 of 16 GiB; at least 4 s a step, at most 4,096 tokens/s; run with "
        "--config.mesh.ring=32 --config.mesh.tensor=2"
    )
    own = answer([suggested(True, 11.64, ring=64)], chip, config)
    assert own.endswith("run with the config's own mesh")
    config.remat = "auto"
    chosen = answer([best], chip, config)
    assert chosen.endswith(" where remat=auto is --config.remat=products")
    # Those that are too large are ranked by time.
    large = [suggested(False, 50, ring=64), suggested(False, 20, ring=32, fsdp=2)]
    refused = answer(large, chip, config)
    assert refused.startswith("does not fit: at least 20 of 16 GiB, with --config.mesh")
    assert "fsdp=2 --config.mesh.ring=32; try --config.remat=nothing" in refused


def test_phases_take_as_long_as_they_took_before(tmp_path, monkeypatch):
    monkeypatch.setattr(phases, "FILE", tmp_path / "new" / "seconds.json")
    shown = []

    def progress(total, unit, what, *, timed):
        shown.append((total, what))
        return contextlib.nullcontext()

    monkeypatch.setattr(phases, "progress", progress)
    for _ in range(2):
        with phases.phase("v4:2x2x1", "compiling"):
            pass
    phases.FILE.write_text("damaged")
    with pytest.raises(TooLarge), phases.phase("v4:2x2x1", "compiling"):
        raise TooLarge  # and takes less long than a plan that fits
    with phases.phase("v4:2x2x1", "compiling"):
        pass
    unknown = (None, "compiling")
    assert shown == [unknown, (0.0, "compiling (0 s before)"), unknown, unknown]
