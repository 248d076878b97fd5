"""JSON lines and Weights & Biases: what is written, resumed, lost, and said."""

import contextlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from tests.support import buckets
from training.reports import sinks
from training.reports.sinks import JsonLines, WandbSink, check_wandb


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def write(path: Path, first_step: int, last_step: int, value: float) -> list[tuple]:
    """Steps and losses of all lines that are there then."""
    with JsonLines(path, first_step) as sink:
        for step in range(first_step, last_step + 1):
            sink.scalars(step, {"loss": value})
    return [(row["step"], row["loss"]) for row in read(path)]


def test_every_point_is_a_line_at_once(path):
    times = iter(range(100, 105))
    sink = JsonLines(path, 1, clock=lambda: next(times))
    assert path.read_text() == ""
    sink.scalars(1, {"loss/train": jnp.float32(0.1), "n": 3})
    sink.scalars(1, {"inf": math.inf, "nan": math.nan, "goodput": 0.5})
    assert read(path) == [
        {"step": 1, "time": 101, "loss/train": float(jnp.float32(0.1)), "n": 3.0},
        {"step": 1, "time": 103, "inf": None, "nan": None, "goodput": 0.5},
    ]


# What a kill or a fault leaves at the end; it hides no other line.
ENDS = "", '{"step": 3, "lo', '{"step": 3}', "\n", "\xff", '{"step": null}\n'


@pytest.mark.parametrize("end", [*ENDS, 100_000 * "[" + "\n"], ids=range(7))
def test_a_resumed_run_replaces_the_lines_from_its_first_step(path, end):
    write(path, 1, 7, 1.0)
    before = path.read_bytes()
    path.write_bytes(before + end.encode("latin-1"))
    kept = [(step, 1.0) for step in range(1, 8)]
    assert write(path, 8, 9, 2.0) == [*kept, (8, 2.0), (9, 2.0)]
    assert write(path, 5, 5, 3.0) == [*kept[:4], (5, 3.0)]
    assert path.read_bytes().splitlines()[:4] == before.splitlines()[:4]
    # From the start, as one without a checkpoint.
    assert write(path, 1, 1, 3.0) == [(1, 3.0)]
    assert [*path.parent.iterdir()] == [path]


def test_points_that_cannot_be_written_are_kept_until_they_can(path, monkeypatch):
    said = []
    sink = JsonLines(path, 1, said.append)
    sink.scalars(1, {"loss": 1.0})

    @contextlib.contextmanager
    def full(path, mode):
        """A file that takes a part."""

        def write(new):
            file.write(new[:9])
            raise OSError(28, "No space left on device")

        with path.open(mode) as file:
            yield SimpleNamespace(truncate=file.truncate, write=write)

    with monkeypatch.context() as patch:
        patch.setattr(sinks, "open", full, raising=False)
        for step in 2, 3:
            sink.scalars(step, {"loss": 1.0})
    (warning,) = said
    assert warning.startswith(f"WARNING: {path} cannot be written now: [Errno 28]")
    sink.scalars(4, {"loss": 1.0})
    assert [row["step"] for row in read(path)] == [1, 2, 3, 4]


def test_a_bucket_gets_the_file_whole_now_and_then():
    now, path = [0.0], "gs://bucket/run/metrics.jsonl"
    with buckets.in_memory() as store:

        def there() -> list[int]:
            lines = store["/bucket/run/metrics.jsonl"].getvalue().decode().splitlines()
            return [json.loads(line)["step"] for line in lines]

        for first in 1, 3:
            sink = JsonLines(path, first, clock=lambda: now[0])
            sink.scalars(first, {"loss": 1.0})
            assert there() == list(range(1, first))
            now[0] += sinks.FLUSH_SECONDS
            sink.scalars(first + 1, {"loss": 1.0})
            assert there() == list(range(1, first + 2))
            sink.scalars(first + 2, {"loss": 1.0})
            sink.close()
        assert there() == [1, 2, 3, 4, 5]


class Fake:
    """In the place of the module wandb, with one run."""

    Error, Settings = type("Error", (Exception,), {}), SimpleNamespace
    step, fault, ended = 4, None, False

    def __init__(self) -> None:
        self.logged: list[tuple] = []

    def init(self, **fields: Any) -> "Fake":
        self.begun = fields
        self.login()
        return self

    def login(self) -> None:
        if self.fault:
            raise self.fault

    def log(self, points: dict[str, float], step: int) -> None:
        self.login()
        self.logged.append((step, points))

    def finish(self) -> None:
        self.ended = True


@pytest.fixture
def wandb(monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_goes_on_with_the_run_and_gets_no_step_twice(wandb, tmp_path):
    config = {"train": {"steps": 9}}
    with WandbSink(str(tmp_path), "0badcafe", config) as sink:
        for step in 3, 4, 5:
            sink.scalars(step, {"loss": jnp.float32(0.5)})
        sink.flush()
    assert wandb.logged == [(4, {"loss": 0.5}), (5, {"loss": 0.5})] and wandb.ended
    wanted = {"id": "0badcafe", "resume": "allow", "dir": str(tmp_path)}
    wanted |= {"name": tmp_path.name, "config": config}
    assert wandb.begun.items() >= wanted.items()
    WandbSink("gs://bucket/run", "0badcafe", {})
    assert wandb.begun["dir"] is None


def test_points_that_wandb_loses_are_said_once_and_end_no_run(wandb, tmp_path):
    said: list[str] = []
    sink = WandbSink(str(tmp_path), "0badcafe", {}, said.append)
    wandb.fault = Fake.Error("No API key configured.")
    for step in 5, 6:
        sink.scalars(step, {"loss": 1.0})
    assert said == ["WARNING: points of W&B are lost: No API key configured."]
    # But it has to begin.
    for begin in check_wandb, lambda: WandbSink(str(tmp_path), "0badcafe", {}):
        with pytest.raises(ValueError, match=r"No API key .*Set WANDB_MODE=offline"):
            begin()
    wandb.fault = None
    sink.scalars(7, {"loss": 1.0})
    assert wandb.logged == [(7, {"loss": 1.0})]
