"""Curves on disk, rates from a fake clock, the console's line, goodput, chips."""

import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from tensorboard.summary.writer import event_file_writer

from kernels.devices import chips
from kernels.devices.chips import CHIPS
from tests.cases import table
from tests.small.runs import read_scalars
from training.reports import sinks
from training.reports.goodput import KINDS, Goodput
from training.reports.metrics import StepWork, Throughput
from training.reports.report import console_line
from training.reports.sinks import TensorBoardWriter, run_directory
from training.sharding.overlap import GATHERS, OFFLOADS, parameter_options

WORK = StepWork(1000, 2e12, 4e12)


class Timed(Throughput):
    """Throughput by a clock that moves with `now` alone."""

    now = 1000.0

    def __init__(self, devices: int = 1, peak: float | None = None, begun: bool = True):
        super().__init__(num_devices=devices, peak_flops=peak, clock=lambda: self.now)
        if begun:
            self.rates()

    def rates(self) -> dict[str, float]:
        return self.report(self.now)

    def step(self, seconds: float, work: StepWork = WORK) -> None:
        self.count(work)
        self.now += seconds


@pytest.fixture(autouse=True)
def files_in_order(monkeypatch):
    """The names of two files of one second are sorted as text: number 10 before 9."""
    first = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", first)


def write(directory: Path, first_step: int, losses: Iterable[float]) -> None:
    with TensorBoardWriter(directory, first_step) as writer:
        for step, loss in enumerate(losses, first_step):
            writer.scalars(step, {"loss": loss})


def test_a_resumed_run_replaces_the_points_after_its_first_step(tmp_path):
    with TensorBoardWriter(tmp_path, first_step=0) as writer:
        for step in range(8):
            writer.scalars(step, {"loss": 10.0 + step, "killed_run_only": 1.0})
    (event_file,) = tmp_path.iterdir()
    os.truncate(event_file, event_file.stat().st_size - 3)  # cut off by a kill
    write(tmp_path, 5, [105.0, 106.0])
    assert read_scalars(tmp_path) == {
        "loss": [*((n, 10.0 + n) for n in range(5)), (5, 105.0), (6, 106.0)],
        "killed_run_only": [(n, 1.0) for n in range(5)],
    }


@pytest.mark.parametrize("before", ["tensorboard/old_name", "tensorboard"])
def test_a_run_whose_workdir_was_moved_goes_on_in_its_folder(tmp_path, before):
    """Also one from before runs had names."""
    curves, workdir = str(tmp_path / "tensorboard"), str(tmp_path / "new_name")
    assert run_directory(curves, workdir) == f"{curves}/new_name"
    write(tmp_path / before, 0, [2.0])
    assert run_directory(curves, workdir) == str(tmp_path / before)


def test_rates_are_those_of_the_steps_since_the_last_report():
    """Of packed documents, whose FLOPs differ from step to step."""
    throughput = Timed(4, 10e12, begun=False)
    throughput.step(60)
    assert throughput.rates() == {}
    for seconds, steps in ((2.0, 4), (9.0, 3)):
        for _ in range(steps - 1):
            throughput.step(seconds / steps)
        throughput.step(seconds / steps, StepWork(3000, 4e12, 4e12))
        assert throughput.rates() == pytest.approx(
            {
                "perf/step_time": seconds / steps,
                "perf/tokens_per_second": 1000 * (steps + 2) / seconds,
                "perf/tokens_per_second_per_device": 250 * (steps + 2) / seconds,
                "perf/mfu": 2e12 * (steps + 1) / (seconds * 40e12),
                "perf/mfu_paper": 4e12 * steps / (seconds * 40e12),
            }
        )
    throughput.now += 2
    assert throughput.rates() == {}  # of no steps


def test_pauses_are_left_out_of_the_rates(monkeypatch):
    throughput, state = Timed(), {"weight": jnp.ones(2)}
    with pytest.raises(OSError), throughput.exclude():
        throughput.now += 30
        raise OSError("disk full")

    def finish(arrays):
        assert arrays is state
        throughput.now += 5

    # What the devices still compute belongs to the steps, not to the pause.
    monkeypatch.setattr(jax, "block_until_ready", finish)
    throughput.step(1)
    with throughput.exclude(after=state):
        throughput.now += 30
    rates = throughput.rates()  # of an unknown chip, and so no MFU
    assert rates.pop("perf/step_time") == 6.0 and len(rates) == 2
    throughput.step(3)
    assert throughput.rates()["perf/step_time"] == 3.0


@pytest.mark.parametrize("rates, shown", table("runs.txt", "console"))
def test_console_line_shows_what_is_known(rates, shown):
    values = {"loss": 2.34121, "grad_norm": 0.8123, "learning_rate": 3e-4}
    values |= {f"perf/{name}": rate for name, rate in rates.items()}
    begin = "step  120/1000  loss 2.3412  grad 0.812  lr 3.0e-04  "
    assert console_line(120, 1000, values) == begin + shown


def test_a_full_disk_costs_points_and_no_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    warnings = []
    with TensorBoardWriter(tmp_path, 1, warnings.append) as writer:
        writer.scalars(1, {"loss/train": 4.0})
        writer.flush()
        with monkeypatch.context() as patch:
            patch.setattr(sinks.EventFileWriter, "add_event", refuse)
            writer.scalars(2, {"loss/train": 3.0})
            writer.scalars(3, {"loss/train": 2.5})
            writer.flush()
        writer.scalars(4, {"loss/train": 2.0})
    assert read_scalars(tmp_path)["loss/train"] == [(1, 4.0), (4, 2.0)]
    (line,) = warnings
    assert line.startswith(f"WARNING: points of {tmp_path} are lost: ")
    assert "No space left" in line


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make_steps(goodput: Goodput, clock: Clock, steps: range, seconds: float) -> None:
    goodput.switch("step")
    for step in steps:
        clock.now += seconds
        goodput.step(step)


def test_seconds_belong_to_what_was_going_on(clock):
    goodput = Goodput(clock)
    clock.now += 3
    with goodput.spend("compile"):
        clock.now += 5
    clock.now += 1
    goodput.switch("step")
    clock.now += 20
    with pytest.raises(ZeroDivisionError), goodput.spend("evaluation"):
        clock.now += 2
        with goodput.spend("save"):
            clock.now += 4
        raise ZeroDivisionError
    clock.now += 5
    points = goodput.points()
    spent = {"setup": 4, "compile": 5, "step": 25, "evaluation": 2, "save": 4}
    for kind in KINDS:
        assert points[f"wall_time/{kind}_seconds"] == spent.get(kind, 0)
    assert points["wall_time/goodput"] == 25 / 40
    assert str(goodput) == (
        "goodput 62.5 % of 40.0 s "
        "(setup 4.0, compile 5.0, step 25.0, save 4.0, evaluation 2.0)"
    )


def test_steps_that_are_made_again_are_lost(clock, tmp_path):
    record = tmp_path / "goodput.json"
    first = Goodput(clock, record_every_seconds=0)
    first.resume(record, 0)
    make_steps(first, clock, range(1, 18), seconds=2)
    # Killed after step 17; the checkpoint is that of step 10.
    clock.now += 1000
    again = Goodput(clock, record_every_seconds=0)
    clock.now += 6
    again.resume(record, 10)
    make_steps(again, clock, range(11, 16), seconds=3)
    seconds = {k: s for k, s in again.seconds.items() if s}
    assert seconds == {"setup": 6, "lost": 14, "step": 20 + 15}
    # And a third time: what a start has lost stays lost.
    third = Goodput(clock)
    third.resume(record, 13)
    assert third.seconds["lost"] == 14 + 2 * 3
    assert third.seconds["step"] == 20 + 9
    new = Goodput(clock)
    new.resume(record, 0)
    assert not any(new.seconds.values())


RECORD = {"step": 9, "seconds_per_step": 2.0, "seconds": dict.fromkeys(KINDS, 3.0)}
BAD_RECORDS = "", "[]", '{"step": 3}', json.dumps(RECORD | {"seconds": None})


@pytest.mark.parametrize("text", [None, *BAD_RECORDS], ids=range(5))
def test_a_record_that_cannot_be_read_does_not_stop_the_run(clock, tmp_path, text):
    record = tmp_path / "goodput.json"
    if text is not None:
        record.write_text(text)
    goodput, lines = Goodput(clock), []
    goodput.resume(record, 7, lines.append)
    assert not any(goodput.seconds.values())
    assert len(lines) == (text is not None)
    for line in lines:
        assert (
            line.startswith(f"{record} is left out of the goodput") and "\n" not in line
        )
    goodput.record(7)
    assert json.loads(record.read_text())["step"] == 7


def test_the_record_is_written_now_and_then_where_it_can_be(clock, tmp_path):
    record = tmp_path / "goodput.json"
    goodput = Goodput(clock, record_every_seconds=10)
    goodput.resume(record, 0)
    written = []
    for step in range(1, 9):
        make_steps(goodput, clock, range(step, step + 1), seconds=4)
        written.append(json.loads(record.read_text())["step"])
    assert written == [1, 1, 1, 4, 4, 4, 7, 7]
    assert [*tmp_path.iterdir()] == [record]
    nowhere = Goodput(clock)
    nowhere.resume(tmp_path / "nowhere" / "goodput.json", 0)
    make_steps(nowhere, clock, range(1, 3), seconds=4)
    nowhere.record(2)
    assert nowhere.seconds["step"] == 8


def test_known_kinds_have_their_published_peak_and_others_nothing():
    for kind, *known in table("runs.txt", "peak"):
        chip = chips.find(kind)
        assert [chip.name, chip.peak_flops] == known
    with pytest.raises(ValueError, match="matrix_units of GB200 must be known, got 0"):
        _ = chip.bundles_per_second
    unknown = ["", "TPU v4 lite", "TPU v9", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "v4"]
    for kind in [*unknown, jax.devices("cpu")[0].device_kind]:
        assert chips.find(kind) is None


def test_options_are_those_that_the_chip_can_follow():
    """Collectives of parameters run beside the compute, where they can."""
    offload = "TPU v5p", "TPU v6e", "TPU7x"
    wanted = dict.fromkeys(offload, dict.fromkeys(OFFLOADS, "true"))
    wanted |= {chip: {option: "true"} for chip, option in GATHERS.items()}
    found = {chip.name: parameter_options(chip) for chip in CHIPS}
    assert {name: options for name, options in found.items() if options} == wanted
    assert parameter_options(None) == {} and len(OFFLOADS) == 4
    assert GATHERS.keys() == {"TPU v4", "TPU v5e"}


@pytest.mark.parametrize("kind, version, cores, hertz", table("runs.txt", "chip"))
def test_tpu_rows_are_near_the_compilers_own(kind, version, cores, hertz):
    """JAX's rounded table differs by up to 14 %; half a chip would differ by 100 %."""
    chip = chips.find(kind)
    assert chip.name == f"TPU {version}".replace("TPU 7x", "TPU7x")
    # A core starts a bundle a cycle.
    assert chip.bundles_per_second == pytest.approx(cores * hertz, rel=3e-3)
    # JAX's numbers are those of one TensorCore.
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(version), cores)
    for ours, theirs, tolerance in (
        (chip.peak_flops, info.bf16_ops_per_second, 0.15),
        (chip.hbm_bytes, info.hbm_capacity_bytes, 0.02),
        (chip.hbm_bytes_per_second, info.mem_bw_bytes_per_second, 0.15),
    ):
        assert ours == pytest.approx(cores * theirs, rel=tolerance)
