"""Records the name, settings and data of a run.

Every checkpoint holds it, so a resumed run finds what has changed since; and the
processes of a run compare theirs before they compute anything.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from training.hosts.processes import first_says, tell_all
from training.saved.stored_step import differences, is_named, listed

RUN, SETTINGS = "run", "settings"

PATHS = ("data.corpus", "data.trajectories")
"""Settings that are paths of data; `contents` identifies the data."""

PINNED = ("seed", "data")
"""Settings that decide which data a step reads."""

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of the environment that change what is compiled."""

OPTIONS = (
    "enable_x64 default_matmul_precision default_prng_impl threefry_partitionable "
    "numpy_dtype_promotion use_shardy_partitioner optimization_level"
).split()
"""JAX's options that change what is computed, or how."""


def continued(
    saved: Mapping[int, Mapping[str, Any]],
    settings: Mapping[str, Any],
    may_change: Collection[str],
    say: Callable[[str], None],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the record of a new or resumed run; logs what has changed since.

    Args:
      saved: the record that each checkpoint holds, the newest first; empty for
        imported weights.
      settings: of this start, JSON values by dotted name.
      may_change: names of settings that may change though they decide which data a step
        reads; "run" where the checkpoints may be of several runs.
      say: logs a line.
      defaults: of settings, which a program that lacked them computed with.

    Raises:
      ValueError: checkpoints are of several runs, a setting has changed that must not,
        or `may_change` names no setting.
    """
    _check_names(may_change, settings)
    runs = {step: record[RUN] for step, record in saved.items() if record}
    if len(set(runs.values())) > 1 and RUN not in may_change:
        steps = ", ".join(f"step {step} of run {run}" for step, run in runs.items())
        raise ValueError(
            f"the workdir holds checkpoints of several runs ({steps}): move away those "
            f'that were copied here, or allow it with --config.may_change="{(RUN,)}"'
        )
    newest: Mapping[str, Any] = {}
    if saved:
        step = next(iter(saved))
        newest = saved[step]
        if newest:
            added = settings.keys() & defaults.keys() - newest[SETTINGS].keys()
            known = newest[SETTINGS] | {name: defaults[name] for name in added}
            _compare(step, known, settings, may_change, say)
    # The first process's: each of them would draw another one.
    name = newest.get(RUN) or f"{first_says(secrets.randbits(31)):08x}"
    return {RUN: name, SETTINGS: dict(settings)}


def _compare(
    step: int,
    saved: Mapping[str, Any],
    settings: Mapping[str, Any],
    may_change: Collection[str],
    say: Callable[[str], None],
) -> None:
    """Logs every change; refuses those that decide which data a step reads."""
    changes = differences(saved, settings, may_differ=["may_change"])
    refused = {}
    for name, change in changes.items():
        is_pinned = is_named(name, PINNED) and not is_named(name, may_change)
        if is_pinned and name not in PATHS:
            refused[name] = change
    if refused:
        raise ValueError(
            f"step {step} was made with other settings: {listed(refused, '; ')}. They "
            "say which data a step reads, so the run would skip some and repeat others:"
            " set them back, use another workdir, or allow it with "
            f'--config.may_change="{tuple(refused)}"'
        )
    for name, (before, now) in changes.items():
        say(f"changed since step {step}: {name}: {before} -> {now}")


def agreed(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the settings, or other facts, that every process of the run has.

    make: gives those of this process; every process has to call this.

    Raises:
      ValueError, OSError: those of `make`, on any process; or the processes have other
        settings, by field, or would compile other programs (see `_program`). On all of
        them alike.
    """
    settings: dict[str, Any] = {}
    error: Exception | None = None
    try:
        settings = make()
    except (ValueError, OSError) as caught:
        error = caught
    # A process that has an error sends it, and does not raise before the exchange: the
    # others, who are there, would wait for it for ever.
    replies = []
    if jax.process_count() > 1:
        compared = settings | _program()
        own = {"error": error and str(error), SETTINGS: compared}
        replies = [json.loads(text) for text in tell_all(json.dumps(own))]
    if error is not None:
        raise error
    for index, process in enumerate(replies):
        if process["error"]:
            raise ValueError(f"process {index}: {process['error']}")
    _check_alike([process[SETTINGS] for process in replies])
    return settings


def _program() -> dict[str, str]:
    """Returns what decides, beside its settings, which programs a run compiles."""
    # Sources too: after a pull on one host alone all would train together, by programs
    # that differ.
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    files = []
    for folder in "kernels", "models", "data", "training", "tasks":
        files.extend((root / folder).rglob("*.py"))
    for file in (root / "train.py", *sorted(files)):
        digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    platform = jax.devices()[0].client.platform_version  # of libtpu, or of CUDA
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, {platform}"
    program = {"program": f"sources {digest.hexdigest()[:16]}", "versions": versions}
    for name in FLAGS:
        flags = os.environ.get(name, "").split()
        # Hosts may write what they dump to places of their own.
        program[name] = " ".join(x for x in flags if not x.startswith("--xla_dump"))
    for name in OPTIONS:
        program[f"jax_{name}"] = str(jax.config.values[f"jax_{name}"])
    return program


def _check_alike(settings: list[dict[str, Any]]) -> None:
    """Refuses processes whose settings differ."""
    unlike = []
    for name in sorted(set().union(*settings).difference(PATHS)):
        values: dict[str, list[int]] = {}
        for index, of_process in enumerate(settings):
            values.setdefault(json.dumps(of_process.get(name)), []).append(index)
        if len(values) == 1:
            continue
        given = []
        for value, indices in values.items():
            others = f" and {len(indices) - 1} more" if indices[1:] else ""
            given.append(f"{value} on process {indices[0]}{others}")
        unlike.append(f"{name}: {', '.join(given)}")
    if unlike:
        raise ValueError(
            f"the processes of this run differ in {'; '.join(unlike)}: start the same "
            "command, with the same program and data, on every host"
        )


def _check_names(may_change: Collection[str], settings: Mapping[str, Any]) -> None:
    known = [*settings, RUN]
    for name in may_change:
        if not any(is_named(field, [name]) for field in known):
            raise ValueError(
                f"config.may_change={tuple(may_change)} names {name!r}, which is not "
                "a field of the config: see configs/base.py"
            )
