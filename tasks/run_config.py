"""The config that a run keeps beside its checkpoints, to be started again from there.

What is compared on resume is what each checkpoint was made with
(`training/saved/record.py`): this file is the config of the newest start, every field
of it.
"""

import json
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from configs import agents, base
from data.json_text import parse_json, short
from tasks.config_errors import fields_by_name
from training.saved.record import PINNED, RUN
from training.saved.stored_step import is_named
from training.saved.workdir import path_of, replace_text

FILE = "config.json"

NOT_KEPT = ("workdir", "hosts.index")
"""Fields that the place of the file and the process say."""


def write(config: ConfigDict, settings: Mapping[str, Any] | None = None) -> None:
    """Writes the config into its workdir, whole or not at all.

    Of `may_change` it leaves out what this start alone was allowed: another run, and
    other data.

    settings: of the run (see `run_settings`), for what the config left open, as the
      vocabulary: then no tool needs the corpus to know it.

    Raises:
      OSError: it cannot be written.
    """
    kept = config.copy_and_resolve_references()
    fields = fields_by_name(config)
    known = settings or {}
    pinned = [RUN, *(name for name in fields if is_named(name, PINNED))]
    with kept.unlocked():
        kept.update_from_flattened_dict(
            {name: known[name] for name in fields if name in known}
        )
        kept.may_change = tuple(
            name
            for name in config.may_change
            if not any(is_named(field, [name]) for field in pinned)
        )
        del kept.workdir
        del kept.hosts.index
    written = json.dumps(kept.to_dict(), indent=2) + "\n"
    replace_text(path_of(config.workdir) / FILE, written)


def defaults(task: str) -> dict[str, Any]:
    """Returns the defaults of a task's fields, JSON values by dotted name."""
    return json.loads(json.dumps(fields_by_name(_default_config(task))))


def read(workdir: str) -> ConfigDict:
    """Returns the config of the run in a workdir, with this as its `workdir`.

    Fields that the run's program did not have yet have their defaults.

    Raises:
      FileNotFoundError: there is no run, or the workdir keeps no config.
      ValueError: the file is not JSON, or has a field that is unknown here or of
        another type.
    """
    path = path_of(workdir) / FILE
    if not path.parent.exists():
        raise FileNotFoundError(f"there is no workdir {workdir}")
    if not path.exists():
        raise FileNotFoundError(
            f"{workdir} has no {FILE}: no run has begun in it; give "
            f"--config=configs/NAME.py and --config.workdir={workdir} instead"
        )
    try:
        written = parse_json(path.read_text())
        if not isinstance(written, dict):
            raise ValueError(f"it must hold a JSON object, got {short(written)}")
        values = fields_by_name(ConfigDict(written))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON of a config ({error})") from error
    config = _default_config(values.get("task", ""))
    known = fields_by_name(config)
    unknown = [n for n in values if n not in known or n in NOT_KEPT]
    if unknown:
        raise ValueError(
            f"{path} has fields that this program does not know: {', '.join(unknown)}; "
            "use the program that wrote it, or take them out of it"
        )
    typed = {}
    for name, value in values.items():
        typed[name] = _typed(f"{path}: {name}", value, known[name])
    config.update_from_flattened_dict(typed | {"workdir": workdir})
    return config


def _default_config(task: str) -> ConfigDict:
    return agents.get_config() if task == "exorl" else base.get_config()


def _typed(name: str, value: Any, like: Any) -> Any:
    """Returns a JSON value as the type of a field's default; raises ValueError."""
    if isinstance(like, tuple) and isinstance(value, list):
        return _tuple(value)
    if isinstance(like, float) and type(value) is int:
        return float(value)
    if type(value) is not type(like):
        wanted = "list" if isinstance(like, tuple) else type(like).__name__
        raise ValueError(f"{name}={short(value)} must be of type {wanted}")
    return value


def _tuple(values: list) -> tuple:
    return tuple(_tuple(each) if isinstance(each, list) else each for each in values)
