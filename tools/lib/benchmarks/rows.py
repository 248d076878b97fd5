"""Timing in rounds, the parts of a row, and the file of rows, for all benchmarks.

A row is a flat JSON object, so that a file of rows is a table for whatever reads it.
Its keys are the fields of `Environment` and of `times`, and what a benchmark adds.
"""

import argparse
import dataclasses
import datetime
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels.devices import chips
from tools.lib.files import write_json

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Environment:
    """Where and when rows were measured.

    commit: of the tree, None outside of a repository.
    dirty: whether the tree had changes that are not in the commit.
    date: UTC, ISO 8601.
    cores: of the host, which simulated devices share.
    load: mean number of runnable processes on the host in the minute before.
    """

    commit: str | None
    dirty: bool
    date: str
    jax: str
    device_kind: str
    device_count: int
    cores: int
    load: float

    @classmethod
    def of(cls, devices: Sequence[jax.Device]) -> "Environment":
        """Describes the environment now, before anything is timed."""
        return cls.now(devices[0].device_kind, len(devices))

    @classmethod
    def now(cls, device_kind: str, device_count: int) -> "Environment":
        """Describes the environment, with devices that another process has."""
        return cls(
            commit=_git("rev-parse", "HEAD"),
            dirty=bool(_git("status", "--porcelain")),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            jax=jax.__version__,
            device_kind=device_kind,
            device_count=device_count,
            cores=os.cpu_count() or 1,
            load=round(os.getloadavg()[0], 2),
        )


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


class Sample(NamedTuple):
    """Seconds that one run took: by the clock, and of the processor, in all threads."""

    wall: float
    cpu: float


def times(compile_seconds: float, samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the seconds of one run by the clock, compilation apart.

    seconds_spread: (max - min) / median.
    cpu_seconds_median: processor time of all threads of the process. For simulated
      devices it is the work done, and what else the host does hardly disturbs it.
    """
    seconds = [sample.wall for sample in samples]
    median = statistics.median(seconds)
    return {
        "compile_seconds": compile_seconds,
        "repeats": len(samples),
        "seconds_median": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "seconds_spread": (max(seconds) - min(seconds)) / median,
        "cpu_seconds_median": statistics.median(sample.cpu for sample in samples),
    }


def take_sample(run: Callable[[], Any], calls: int = 1) -> Sample:
    """Starts `calls` runs, waits for the last, and returns the seconds of one.

    With several calls, starting a run overlaps the one before it.
    """
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in range(calls):
        last = run()
    jax.block_until_ready(last)
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    return Sample(wall / calls, cpu / calls)


def take_rounds(
    takes: Sequence[Callable[[], Sample]], repeats: int
) -> list[list[Sample]]:
    """Takes `repeats` samples of each, A B C A B C …, after one uncounted round.

    So a machine that is slow for a while is slow for all of them alike.
    """
    rounds = [[take() for take in takes] for _ in range(repeats + 1)]
    return [list(samples) for samples in zip(*rounds[1:], strict=True)]


def peak_share(
    flops_per_second: float, environment: Environment, dtype: jnp.dtype
) -> float | None:
    """Returns the share of the devices' peak; None if unknown or not in bfloat16."""
    chip = chips.find(environment.device_kind)
    if chip is None or dtype != jnp.bfloat16:
        return None
    return flops_per_second / (chip.peak_flops * environment.device_count)


def make_row(*parts: Any) -> dict[str, Any]:
    """Joins dataclasses and dictionaries to one row."""
    row: dict[str, Any] = {}
    for part in parts:
        row |= dataclasses.asdict(part) if dataclasses.is_dataclass(part) else part
    return row


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes rows that were measured just now, with their environment."""
    environment = Environment.of(jax.devices())
    write_json(path, [make_row(row, environment) for row in rows])


def check_output(path: Path) -> None:
    """Raises ValueError if rows cannot go there: ask before anything is measured."""
    if path.exists():
        raise ValueError(f"{path} exists: give another --output, or remove it first")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a directory: make it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(
            f"{path.parent} cannot be written to: {error.strerror}"
        ) from error


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that `report` reads."""
    parser.add_argument("--output", type=Path, help="file of rows to write, a new one")


def table(rows: Sequence[dict[str, Any]], columns: Mapping[str, str]) -> str:
    """Returns rows as text, a line each.

    columns: by title the format of a row's fields; what a row has not is a "-".
    """

    def cell(form: str, row: dict[str, Any]) -> str:
        try:
            return form.format(**row)
        except (KeyError, TypeError):
            return "-"

    texts = []  # (columns, lines)
    for title, form in columns.items():
        cells = [title, *(cell(form, row) for row in rows)]
        width = max(map(len, cells))
        texts.append([text.rjust(width) for text in cells])
    return "\n".join(map("  ".join, zip(*texts, strict=True)))


def report(
    output: Path | None,
    measure: Callable[[], Iterable[dict[str, Any]]],
    columns: Mapping[str, str],
) -> None:
    """Measures rows, writes them to `output` if there is one, and prints their table.

    Each is written when it is there: a time limit loses none that is measured.

    Raises:
      ValueError: `output` exists or cannot be written; before anything is measured.
    """
    if output:
        check_output(output)
    rows = []
    for row in measure():
        rows.append(row)
        if output:
            write_json(output, rows)
    print(table(rows, columns))
