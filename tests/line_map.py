"""A plugin of pytest that writes which lines of the source each test runs.

`python -m tests.mutants map` starts it, alone or in the workers of xdist. It sees no
lines of functions that an earlier test has traced, nor those of other processes.
"""

import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

ROOT = f"{Path(__file__).resolve().parent.parent}/"
NAMES = "kernels models data training tasks configs tools train.py"
SOURCE = tuple(ROOT + name for name in NAMES.split())
TOOL = 4
"""Of `sys.monitoring`."""

_lines: set[tuple[str, int]] = set()
_tests: dict[str, dict[str, Any]] = {}


def _begin() -> None:
    monitoring = sys.monitoring
    line, start = monitoring.events.LINE, monitoring.events.PY_START

    def on_start(code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(SOURCE):
            monitoring.set_local_events(TOOL, code, line)
        return monitoring.DISABLE

    def on_line(code: CodeType, number: int) -> Any:
        _lines.add((code.co_filename.removeprefix(ROOT), number))
        return monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "lines")
    monitoring.register_callback(TOOL, start, on_start)
    monitoring.register_callback(TOOL, line, on_line)
    monitoring.set_events(TOOL, start)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    _lines.clear()
    sys.monitoring.restart_events()
    result = yield
    found: dict[str, set[int]] = {}
    for path, number in _lines:
        found.setdefault(path, set()).add(number)
    marks = {mark.name for mark in item.iter_markers()}
    is_quick = "quick" in marks or not marks & {"thorough", "slow"}
    _tests[item.nodeid] = {
        "cpu": dict(item.user_properties).get("cpu", 0.0),
        "tier": "quick" if is_quick else "thorough",
        "lines": found,
    }
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Writes what this process has seen; the last process joins all that is there."""
    sys.monitoring.set_events(TOOL, 0)
    place = Path(os.environ["ANNULUS_LINE_MAP"])
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        place.with_suffix(f".{worker}").write_bytes(pickle.dumps(_tests))
        return
    for part in place.parent.glob(f"{place.stem}.gw*"):
        _tests.update(pickle.loads(part.read_bytes()))
        part.unlink()
    place.write_bytes(pickle.dumps(_tests))


_begin()
