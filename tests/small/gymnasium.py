"""What is used of gymnasium, in its place: it too calls whatever a spec names."""

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

SPEC = {
    "id": "Ramp-v0",
    "entry_point": f"{__name__}:Ramp",
    "kwargs": {},
    "max_episode_steps": 4,
    "additional_wrappers": [],
    "vector_entry_point": None,
}


class Ramp:
    """An environment that gymnasium has."""


class Wrapper:
    """A wrapper that gymnasium has."""

    def __init__(self, env: Any):
        self.env = env


class RecordVideo(Wrapper):
    """One that writes files."""


def touch(path: str, **_: Any) -> None:
    """Leaves a file, as planted code might."""
    Path(path).touch()


def from_json(text: str) -> Any:
    fields = json.loads(text)
    if fields.keys() != SPEC.keys():
        raise TypeError(f"an EnvSpec has no {fields.keys() ^ SPEC.keys()}")
    spec = SimpleNamespace(**fields)
    spec.additional_wrappers = [SimpleNamespace(**x) for x in spec.additional_wrappers]
    return spec


def _load(entry_point: str) -> Any:
    module, name = entry_point.split(":")
    return getattr(importlib.import_module(module), name)


def make(spec: Any) -> Any:
    environment = _load(spec.entry_point)(**spec.kwargs)
    for wrapper in spec.additional_wrappers:
        environment = _load(wrapper.entry_point)(env=environment, **wrapper.kwargs)
    return environment


def make_vec(spec: Any, rows: int, vectorization_mode: str) -> list[Any]:
    """Makes rows as gymnasium does: the spec's own mode counts."""
    mode = spec.kwargs.pop("vectorization_mode", vectorization_mode)
    if mode == "sync":
        return [make(spec) for _ in range(rows)]
    return _load(spec.vector_entry_point)(num_envs=rows, **spec.kwargs)


def modules() -> dict[str, ModuleType]:
    """Returns modules for `sys.modules`, by name."""
    registration = ModuleType("gymnasium.envs.registration")
    registration.EnvSpec = SimpleNamespace(from_json=from_json)
    package = ModuleType("gymnasium")
    package.make = make
    package.make_vec = make_vec
    package.registry = {"Ramp-v0": SimpleNamespace(entry_point=SPEC["entry_point"])}
    package.wrappers = SimpleNamespace(Wrapper=Wrapper, RecordVideo=RecordVideo)
    package.vector = SimpleNamespace(SyncVectorEnv=lambda makes: [x() for x in makes])
    package.error = SimpleNamespace(Error=LookupError)
    parts = package, ModuleType("gymnasium.envs"), registration
    return {module.__name__: module for module in parts}
