"""What the benchmarks share: timing in turns, the parts of a row, and the file of rows.

A row is a flat JSON object, so that a file of rows is a table for whatever reads it.
Its keys are the fields of the dataclasses here, and what a benchmark adds to them.
"""

import dataclasses
import datetime
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from data.json_text import parse_json
from training import chips

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
        """The environment now, before anything is timed."""
        return cls.now(devices[0].device_kind, len(devices))

    @classmethod
    def now(cls, device_kind: str, device_count: int) -> "Environment":
        """The same, of devices that another process has."""
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


@dataclass(frozen=True)
class Sample:
    """Seconds that one run took: by the clock, and of the processor, in all threads."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Times:
    """Seconds of one run by the clock, compilation apart.

    seconds_spread: (max - min) / median.
    cpu_seconds_median: processor time of all threads of the process. For simulated
      devices it is the work done, and what else the host does hardly disturbs it.
    """

    compile_seconds: float
    repeats: int
    seconds_median: float
    seconds_min: float
    seconds_max: float
    seconds_spread: float
    cpu_seconds_median: float

    @classmethod
    def of(cls, compile_seconds: float, samples: Sequence[Sample]) -> "Times":
        """The summary of every repeat."""
        seconds = [sample.wall for sample in samples]
        median, least, most = statistics.median(seconds), min(seconds), max(seconds)
        return cls(
            compile_seconds=compile_seconds,
            repeats=len(samples),
            seconds_median=median,
            seconds_min=least,
            seconds_max=most,
            seconds_spread=(most - least) / median,
            cpu_seconds_median=statistics.median(sample.cpu for sample in samples),
        )


def take_sample(run: Callable[[], Any]) -> Sample:
    """Runs it once, and waits for what it returns."""
    wall, cpu = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return Sample(time.perf_counter() - wall, time.process_time() - cpu)


def take_turns(
    takes: Sequence[Callable[[], Sample]], repeats: int
) -> list[list[Sample]]:
    """Takes `repeats` samples of each, A B C A B C …, after a turn that does not count.

    So a machine that is slow for a while is slow for all of them alike.

    Returns:
      The samples of each.
    """
    samples: list[list[Sample]] = [[] for _ in takes]
    for turn in range(repeats + 1):
        for take, mine in zip(takes, samples, strict=True):
            sample = take()
            if turn:
                mine.append(sample)
    return samples


def peak_share(
    flops_per_second: float, environment: Environment, dtype: jnp.dtype
) -> float | None:
    """Share of the devices' peak; None on an unknown chip or if not in bfloat16."""
    chip = chips.find(environment.device_kind)
    if chip is None or dtype != jnp.bfloat16:
        return None
    return flops_per_second / (chip.peak_flops * environment.device_count)


def make_row(*parts: Any) -> dict[str, Any]:
    """One row of dataclasses and dictionaries.

    Raises:
      ValueError: two parts have a key in common.
    """
    row: dict[str, Any] = {}
    for part in parts:
        fields = dataclasses.asdict(part) if dataclasses.is_dataclass(part) else part
        if row.keys() & fields.keys():
            raise ValueError(f"two parts have {sorted(row.keys() & fields.keys())}")
        row |= fields
    return row


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


def read_rows(path: Path, *fields: str) -> list[dict[str, Any]]:
    """What `write_rows` wrote.

    fields: that every row has to have.

    Raises:
      ValueError: the file is no JSON, or no list of such rows.
    """
    try:
        rows = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{path} holds no list of rows")
    for number, row in enumerate(rows):
        missing = sorted(set(fields) - set(row if isinstance(row, dict) else ()))
        if missing or not isinstance(row, dict):
            raise ValueError(
                f"{path}: row {number} has no {', '.join(missing) or 'fields'}: give "
                "rows of the program that measures what is drawn"
            )
    return rows


def check_numbers(rows: Sequence[dict[str, Any]], fields: Sequence[str]) -> None:
    """Raises ValueError if a field of a row is no finite number of at least 0."""
    for number, row in enumerate(rows):
        for name in fields:
            value = row[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(
                    f"{name} of row {number} must be a number of at least 0, "
                    f"got {value!r}"
                )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a JSON list, under a temporary name until it is complete."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
