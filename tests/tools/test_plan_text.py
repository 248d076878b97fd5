"""What is printed of plans, against numbers that are known: 7b on a whole v3 pod."""

import dataclasses
import re

import pytest

from tools.lib.planning.estimate import Estimate
from tools.lib.planning.memory import Memory
from tools.lib.planning.plan import Kind, Plan, Transfers
from tools.lib.planning.text import describe, seconds, size
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
    attention_parts=4,
    implementation="pallas_tpu",
    memory=Memory(GIB, 2 * GIB, 3 * GIB, GIB // 2, 13 * GIB // 2, 16 * GIB, 0),
    transfers=Transfers(523_520, 0, RING.bytes_sent, 0, 196_736),
    collectives=(RING, REDUCED, GATHERED),
    unknown_loops=0,
    work=StepWork(8_388_608, 5.5e19, 1.1e20),
    estimate=Estimate(18.7, 4958.2, 21.25, 0.0, 0.519, 0.355, ("some", "more")),
    compile_seconds=52.4,
    planner_bytes=3 * GIB,
)


def cells(plan: Plan) -> list[list[str]]:
    """Of the lines that have columns."""
    return [re.split(r"\s{2,}", line.strip()) for line in describe(plan)]


def row(plan: Plan, name: str) -> list[str]:
    (found,) = (line for line in cells(plan) if line[0] == name)
    return found[1:]


def test_columns_of_what_is_sent_say_what_they_hold():
    head = ["times", "bytes each", "bytes in all", "time", "exposed", "waited", "why"]
    assert row(PLAN, "sent by a device in a step") == head
    # At 100 GB/s one way, as a ring goes, and 200 GB/s both ways.
    every = ["523,520", "40.00 MiB", "19.97 TiB", "219.6 s", "none", "all hidden"]
    assert row(PLAN, "collective-permute (ring)") == every
    *every, why = row(PLAN, "all-reduce")
    assert every == ["644", "127.20 MiB", "80.00 GiB", "429 ms", "80.00 GiB", "429 ms"]
    assert why == "not asynchronous: nothing runs beside it"
    *every, why = row(PLAN, "all-gather")
    assert every == ["192", "128.00 MiB", "24.00 GiB", "129 ms", "16.00 GiB", "85.9 ms"]
    assert why == "4.00 GiB not asynchronous, beside the rest runs no kernel"
    assert not any("0 B" in cell for line in cells(PLAN) for cell in line)


def test_hidden_transfers_that_devices_wait_for_are_explained():
    text = " ".join(" ".join(line) for line in cells(PLAN))
    assert "hidden: a kernel or a product runs between start and end" in text
    assert "devices wait for what outlasts it, which the estimate" in text
    for name, shown in (
        ("waits: hidden ring transfers, after their kernels", "21.2 s"),
        ("waits: exposed ring transfers", "0 s"),
        ("waits: other exposed collectives", "519 ms"),
        ("step (all of these)", "4,998.7 s"),
        ("MFU at most", "35.5%"),
    ):
        assert row(PLAN, name) == [shown]
    assert PLAN.estimate.exposed == pytest.approx(21.769)


ALONE = dataclasses.replace(GATHERED, synchronous_bytes=0)


@pytest.mark.parametrize(
    ("kind", "kernels", "why"),
    [
        (GATHERED, 0, "pallas_tpu attention has no kernel that could hide it"),
        (ALONE, 9, "no kernel runs beside it"),
    ],
)
def test_what_is_exposed_says_why(kind, kernels, why):
    transfers = dataclasses.replace(PLAN.transfers, kernels=kernels)
    plan = dataclasses.replace(PLAN, transfers=transfers, collectives=(kind,))
    assert row(plan, "all-gather")[-1] == why


def test_no_transfers_and_loops_that_were_counted_once_are_told():
    plan = dataclasses.replace(PLAN, collectives=())
    assert ["sent by a device in a step: nothing"] in cells(plan)
    plan = dataclasses.replace(PLAN, unknown_loops=3)
    assert ["3 loops of unknown length counted once"] in cells(plan)


def test_a_plan_begins_with_its_devices_mesh_and_step():
    first, step, compiled, *_ = describe(PLAN)
    mesh = "data 1 x fsdp 1 x ring 512 x tensor 1"
    assert first == f"512 x TPU v3 (v3:16x16): {mesh}"
    assert step.startswith(
        "step: 1 x 8,388,608 tokens, remat nothing, attention pallas_tpu, "
    )
    assert "time of a step: at least, estimated and not measured" in describe(PLAN)


def test_memory_adds_up_and_tells_too_little_spare():
    for name, shown in (
        ("parameters", "1.00 GiB"),
        ("optimizer state", "2.00 GiB"),
        ("saved by layers (formula of remat=nothing)", "3.00 GiB"),
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
