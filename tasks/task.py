"""Chooses the task that `config.task` names, and records the settings of its run."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from kernels.cost.work import Row
from tasks import corpora, exorl, text
from tasks.config_errors import fields_by_name
from tasks.run import Run
from tasks.systems import partition
from training.mesh import Partition
from training.stored_step import is_named

TASKS = {"text": text, "exorl": exorl}
"""Modules of the tasks; each has `sizes`, `identify` and a `Run`, of RUNS."""
RUNS = {"text": text.TextRun, "exorl": exorl.AgentRun}

# Fields in which the hosts of a run may differ, and its starts.
_OF_A_HOST = (
    "hosts",
    "simulated_devices",
    "keep_programs",
    "profile",
    "data.threads",
    "data.compare_digests",
)
# Fields that only the other task reads.
_UNREAD = {
    "text": ("agent", *(f"data.{name}" for name in exorl.DATA_FIELDS)),
    "exorl": (
        "lora",
        "model.vocab_size",
        "data.corpus",
        "data.rows",
        "data.balanced_steps",
    ),
}


def make_run(
    config: ConfigDict,
    devices: Partition | Sequence[jax.Device],
    rows: tuple[Row, ...] = (),
) -> Run:
    """Returns the run of a config's task on devices, or on a mesh of them.

    rows: what its rows are alike (see `typical_rows`).

    Raises:
      ValueError: the task is unknown, or the mesh does not match the devices.
    """
    _check_task(config)
    if not isinstance(devices, Partition):
        devices = partition(config, devices)
    return RUNS[config.task](config, devices, rows)


def run_settings(config: ConfigDict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the settings of the run, JSON values by dotted name.

    Every field that its task reads, except those that hosts have of their own, and a
    digest of the data (see `training/record.py`).

    say: reports which data files are not compared with their digests.

    Raises:
      ValueError, FileNotFoundError: the task is unknown, or no such data, or they are
        not what was written.
    """
    _check_task(config)
    left_out = (*_OF_A_HOST, *_UNREAD[config.task])
    fields = fields_by_name(config)
    read = {name: fields[name] for name in fields if not is_named(name, left_out)}
    field, digest, unread = TASKS[config.task].identify(config)
    if config.task == "text":
        read["model.vocab_size"] = corpora.vocab_size(config)
    if unread:
        say(f"data: {unread}")
    return json.loads(json.dumps(read | {f"{field}.contents": digest}))


def _check_task(config: ConfigDict) -> None:
    if config.task not in TASKS:
        raise ValueError(f"{config.task=} must be one of {', '.join(TASKS)}")
