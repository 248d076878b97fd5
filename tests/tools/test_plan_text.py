"""What is printed of plans, against numbers that are known: 7b on a whole v3 pod."""

import dataclasses
import json
import re

import pytest

from tools.lib.compiled.hlo import TRANSFER
from tools.lib.planning.estimate import Estimate
from tools.lib.planning.memory import Memory
from tools.lib.planning.plan import Kind, Plan, Transfers
from tools.lib.planning.text import compare, describe, seconds, size
from training.metrics import StepWork

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
    transfers=Transfers(523_520, 0, RING.bytes_sent, 0, 196_736),
    collectives=(RING, REDUCED, GATHERED),
    unknown_loops=0,
    work=StepWork(8_388_608, 5.5e19, 1.1e20),
    estimate=Estimate(4958.2, 18.7, 6.3, 500.0, 21.25, 0.519, 0.355, ("some", "more")),
    compile_seconds=52.4,
    planner_bytes=3 * GIB,
)


def cells(plan: Plan) -> list[list[str]]:
    """Of the lines that have columns."""
    return [re.split(r"\s{2,}", line.strip()) for line in describe(plan)]


def row(plan: Plan, name: str) -> list[str]:
    (found,) = (line for line in cells(plan) if line[0] == name)
    return found[1:]


def test_two_plans_stand_side_by_side_with_their_differences():
    memory = dataclasses.replace(PLAN.memory, peak=7 * GIB)
    faster = Estimate(2458.2, 18.7, 6.3, 250.0, 21.25, 0.519, 0.71, ())
    plan = dataclasses.replace(
        PLAN, memory=memory, estimate=faster, collectives=(RING, REDUCED)
    )
    lines = compare(("old", "new"), (PLAN, plan))
    found = {
        line[0]: line[1:] for line in (re.split(r"\s{2,}", x.strip()) for x in lines)
    }
    assert found["peak memory of a device"] == ["6.50 GiB", "7.00 GiB", "+512.00 MiB"]
    sent = found["exposed bytes of collectives"]
    assert sent == ["96.00 GiB", "80.00 GiB", "-16.00 GiB"]
    kernels = found["A attention kernels"]
    assert kernels == ["4,958.2 s", "2,458.2 s", "-2,500.0 s"]
    assert found["P matrix products"] == ["18.7 s", "18.7 s", "same"]
    assert found["step, at least"] == ["5,505.0 s", "2,755.0 s", "-2,750.0 s"]
    assert found["MFU at most"] == ["35.5%", "71.0%", "+35.5%"]
    # The bars are of one scale.
    lengths = [len(line.split()[-1]) for line in lines[-2:]]
    assert lengths == [72, round(72 * faster.step / PLAN.estimate.step)]


def test_a_plan_that_was_written_is_read(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.row()))
    assert Plan.read(path) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("memory"), "got KeyError: 'memory': plan it again"),
        (lambda row: row["estimate"].pop("elementwise"), "KeyError: 'elementwise'"),
        (lambda row: row.update(devices="many"), "'many' where int should be"),
        (lambda row: row.update(remat=3), "3 where str should be"),
        (lambda row: row.update(mesh=[4]), "TypeError"),
        (lambda row: row["estimate"].update(attention=-1e9), "a step of -9"),
    ],
)
def test_what_is_no_plan_is_refused(change, message, tmp_path):
    value = json.loads(json.dumps(PLAN.row()))
    change(value)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    with pytest.raises(ValueError, match=f"plan.json must be a plan .*{message}"):
        Plan.read(path)


ALONE = dataclasses.replace(GATHERED, synchronous_bytes=0)
LATE = dataclasses.replace(ALONE, name=TRANSFER)


@pytest.mark.parametrize(
    ("kind", "kernels", "why"),
    [
        (GATHERED, 0, "pallas_tpu attention has no kernel that could hide it"),
        (ALONE, 9, "nothing that takes long enough runs beside it"),
        (LATE, 9, "not beside all kernels of its ring step"),
    ],
)
def test_what_is_exposed_says_why(kind, kernels, why):
    transfers = dataclasses.replace(PLAN.transfers, kernels=kernels)
    plan = dataclasses.replace(PLAN, transfers=transfers, collectives=(kind,))
    assert f"  {kind.name}: {why}" in describe(plan)
    assert max(map(len, describe(plan))) <= 100


def test_a_plan_says_what_a_device_costs():
    tokens = PLAN.rows * PLAN.context_tokens
    rate = tokens / PLAN.estimate.step
    printed = cells(PLAN)
    assert ["tokens a second, at most", f"{rate:,.0f}"] in printed
    hours = 1e9 / rate * PLAN.devices / 3600
    assert ["device-hours for 1e9 tokens, at least", f"{hours:,.1f}"] in printed


def test_no_transfers_and_loops_that_were_counted_once_are_told():
    plan = dataclasses.replace(PLAN, collectives=())
    assert ["sent by a device in a step: nothing"] in cells(plan)
    plan = dataclasses.replace(PLAN, unknown_loops=3)
    assert ["3 loops of unknown length counted once"] in cells(plan)


def test_memory_adds_up_and_tells_too_little_spare():
    for name, shown in (
        ("parameters", "1.00 GiB"),
        ("optimizer state", "2.00 GiB"),
        ("saved by layers (formula of what remat keeps)", "3.00 GiB"),
        ("workspace (the rest)", "512.00 MiB"),
        ("peak (all of these)", "6.50 GiB"),
        ("of the device", "16.00 GiB"),
    ):
        assert row(PLAN, name) == [shown]
    assert row(PLAN, "spare") == ["59.4%"]
    memory = dataclasses.replace(PLAN.memory, peak=15.5 * GIB, host=GIB)
    plan = dataclasses.replace(PLAN, memory=memory)
    assert row(plan, "spare") == ["3.1%, below 5%"]
    assert row(plan, "memory of the host, for each device") == ["1.00 GiB"]


def test_times_and_sizes_have_units_that_suit_them():
    shown = [seconds(count) for count in (0, 1.95e-5, 2.52e-4, 0.0252, 2.52, 4958.23)]
    assert shown == ["0 s", "19.5 us", "252 us", "25.2 ms", "2.52 s", "4,958.2 s"]
    shown = [size(count) for count in (512, 1536, 2**20, -(2**31), 3 * 2**40)]
    assert shown == ["512 B", "1.50 KiB", "1.00 MiB", "-2.00 GiB", "3.00 TiB"]
