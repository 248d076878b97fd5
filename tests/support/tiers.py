"""Tiers of tests, by what a test starts.

`make test` runs the quick tests, `make test-thorough` those marked `thorough`, and
`make test-all` those marked `slow` too. A test that starts something of STARTS fails
unless it is marked: `thorough`, or `quick` where it is the one of its kind that
`make test` runs. CPU seconds are printed by file, largest first.
"""

import functools
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest

INTERPRETER = "interpret.interpret_pallas_call"
STARTS = {
    "a process": [
        ("subprocess", "Popen.__init__"),
        ("multiprocessing.process", "BaseProcess.start"),
    ],
    "a run": [("train", "_report")],
    "a chip's compiler": [
        ("tools.lib.compiled.pods", "compile_for"),
        ("tests.support.triton_compiler", "TritonCompiler.__call__"),
    ],
    "a kernel's interpreter": [
        (f"jax._src.pallas.mosaic.{INTERPRETER}", "interpret_pallas_call"),
        (f"jax._src.pallas.mosaic_gpu.{INTERPRETER}", "interpret_pallas_call"),
        ("jax._src.pallas.hlo_interpreter", "pallas_call_hlo_interpret"),
        ("tests.support.simulated_triton", "interpret"),
    ],
}
"""Functions by module: whatever calls one starts this."""

MARKS = "quick", "thorough", "slow"
SHOWN = 25
TOOL = 3
"""Of `sys.monitoring`, which coverage and profilers leave free."""

BEGUN = pytest.StashKey[float]()
_codes: dict[CodeType, str] = {}
_started: set[str] = set()
_seconds: Counter[str] = Counter()


def _watch() -> None:
    """Watches the functions of STARTS in the modules that are imported by now."""
    if sys.version_info < (3, 12):  # where the library alone is tested
        return
    monitoring, start = sys.monitoring, sys.monitoring.events.PY_START
    if monitoring.get_tool(TOOL) is None:
        monitoring.use_tool_id(TOOL, "annulus")
        monitoring.register_callback(TOOL, start, _note)
    for what, functions in STARTS.items():
        for module, name in functions:
            if module in sys.modules:
                parts = name.split(".")
                function: Any = functools.reduce(getattr, parts, sys.modules[module])
                if function.__code__ not in _codes:
                    _codes[function.__code__] = what
                    monitoring.set_local_events(TOOL, function.__code__, start)


def _note(code: CodeType, _: int) -> None:
    what = _codes[code]
    command = sys._getframe(1).f_locals.get("args") if what == "a process" else None
    words = command if isinstance(command, list | tuple) else [""]
    # Git takes milliseconds, and the renderer of chat templates begins once for all.
    is_brief = words[0] == "git" or str(words[-1]).endswith("data/chat/renderer.py")
    if not is_brief:
        _started.add(what)


def _cpu_seconds() -> float:
    """Returns those of this process and of the processes that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks N cases of a test that is `thorough(quick=N)`, spread over all, quick."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        own = [mark for mark in cases[0].own_markers if mark.name == "thorough"]
        marks = own or list(cases[0].iter_markers("thorough"))
        wanted = min((mark.kwargs.get("quick", 0) for mark in marks), default=0)
        number = min(wanted, len(cases))
        for n in range(number):
            cases[n * len(cases) // number].add_marker("quick")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _watch()
    _started.clear()
    item.stash[BEGUN] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    item.user_properties.append(("cpu", _cpu_seconds() - item.stash[BEGUN]))
    if _started and not any(map(item.get_closest_marker, MARKS)):
        started = " and ".join(sorted(_started))
        pytest.fail(f"starts {started}: mark it thorough (see tests/support/tiers.py)")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _seconds[report.nodeid.split("::")[0]] += dict(report.user_properties).get(
            "cpu", 0
        )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _seconds:
        return
    total = f"{_seconds.total():.0f} CPU seconds in {len(_seconds)} files"
    terminalreporter.section(f"{total}, largest first")
    for file, seconds in _seconds.most_common(SHOWN):
        terminalreporter.line(f"{seconds:7.1f} {file}")
