"""JSON lines and Weights & Biases: what is written, resumed, lost, and said."""

import contextlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from tests import buckets
from training import sinks
from training.sinks import JsonLines, Sink, Sinks, WandbSink, check_wandb


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read(path)]


def write(path: Path, first_step: int, last_step: int, value: float) -> None:
    with JsonLines(path, first_step) as sink:
        for step in range(first_step, last_step + 1):
            sink.scalars(step, {"loss": value})


def test_every_point_is_a_line_at_once(tmp_path):
    path, times = tmp_path / "metrics.jsonl", iter(range(100, 200))
    sink = JsonLines(path, 1, clock=lambda: float(next(times)))
    assert path.read_text() == ""
    sink.scalars(1, {"train/loss": jnp.float32(0.1), "n": 3})
    sink.scalars(1, {"inf": math.inf, "nan": math.nan, "goodput": 0.5})
    first, second = read(path)
    assert first.pop("time") < second.pop("time")
    assert first == {"step": 1, "train/loss": float(jnp.float32(0.1)), "n": 3.0}
    assert second == {"step": 1, "inf": None, "nan": None, "goodput": 0.5}


def test_a_resumed_run_replaces_the_lines_from_its_first_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 7, 1.0)
    before = path.read_text().splitlines()
    write(path, 5, 8, 2.0)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert path.read_text().splitlines()[:4] == before[:4]
    assert [row["loss"] for row in read(path)] == 4 * [1.0] + 4 * [2.0]
    write(path, 1, 2, 3.0)  # from the start, as one without a checkpoint
    assert [row["loss"] for row in read(path)] == [3.0, 3.0]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "end",
    [
        *('{"step": 3, "lo', '{"step": 3}', "\n", "\xff"),
        *('{"step": null}\n', 100_000 * "[" + "\n"),
    ],
    ids=range(6),
)
def test_a_line_that_a_kill_or_a_fault_left_hides_no_other(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 1.0)
    path.write_bytes(path.read_bytes() + end.encode("latin-1"))
    write(path, 9, 9, 1.0)
    assert steps(path) == [1, 2, 9]


def test_points_that_cannot_be_written_are_kept_until_they_can(tmp_path, monkeypatch):
    said, path = [], tmp_path / "metrics.jsonl"
    sink = JsonLines(path, 1, said.append)
    sink.scalars(1, {"loss": 1.0})

    @contextlib.contextmanager
    def full(path: Path, mode: str) -> Iterator[SimpleNamespace]:
        """A file that takes a part."""

        def write(new: bytes) -> None:
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
    assert steps(path) == [1, 2, 3, 4]


def test_a_bucket_gets_the_file_whole_now_and_then(tmp_path):
    now = [0.0]
    with buckets.in_memory() as store:

        def there() -> list[int]:
            lines = store["/bucket/run/metrics.jsonl"].getvalue().decode().splitlines()
            return [json.loads(line)["step"] for line in lines]

        for first in 1, 3:
            path = "gs://bucket/run/metrics.jsonl"
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

    class Error(Exception):
        """Theirs."""

    def __init__(self, step: int = 0, fault: Exception | None = None):
        self.step, self.fault, self.logged, self.ended = step, fault, [], False

    def Settings(self, **fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**fields)

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
    fake = Fake(step=4)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_goes_on_with_the_run_and_gets_no_step_twice(wandb, tmp_path):
    config = {"train": {"steps": 9}}
    with WandbSink(str(tmp_path), "0badcafe", config) as sink:
        for step in 3, 4, 5:
            sink.scalars(step, {"loss": jnp.float32(0.5)})
        sink.flush()
    assert wandb.logged == [(4, {"loss": 0.5}), (5, {"loss": 0.5})] and wandb.ended
    begun = wandb.begun
    assert (begun["id"], begun["resume"], begun["dir"]) == (
        "0badcafe",
        "allow",
        str(tmp_path),
    )
    assert (begun["name"], begun["config"]) == (tmp_path.name, config)
    WandbSink("gs://bucket/run", "0badcafe", {})
    assert wandb.begun["dir"] is None


def test_a_wandb_that_cannot_begin_is_refused_with_what_to_do(wandb, tmp_path):
    wandb.fault = Fake.Error("No API key configured.")
    for begin in check_wandb, lambda: WandbSink(str(tmp_path), "0badcafe", {}):
        with pytest.raises(ValueError, match=r"No API key .*Set WANDB_MODE=offline"):
            begin()


def test_points_that_wandb_loses_are_said_once_and_end_no_run(wandb, tmp_path):
    said: list[str] = []
    sink = WandbSink(str(tmp_path), "0badcafe", {}, said.append)
    wandb.fault = Fake.Error("gone")
    for step in 5, 6:
        sink.scalars(step, {"loss": 1.0})
    assert said == ["WARNING: points of W&B are lost: gone"]
    wandb.fault = None
    sink.scalars(7, {"loss": 1.0})
    assert wandb.logged == [(7, {"loss": 1.0})]


def test_several_sinks_get_every_call_and_none_is_needed(tmp_path):
    called = []

    class Calls(Sink):
        """Says which method was called."""

        def __getattribute__(self, name: str) -> Any:
            called.append(name)
            return super().__getattribute__(name)

    for sink in Sinks([Calls(), Calls()]), Sink():
        with sink:
            sink.scalars(1, {"loss": 1.0})
            sink.flush()
    wanted = [name for name in vars(Sink) if not name.startswith("_")]
    assert sorted(called) == sorted(2 * wanted)
