"""Draws mutants of the source, and finds those that no test kills.

    python -m tests.support.mutants map MAP [pytest's arguments]   lines of each test
    python -m tests.support.mutants run MAP --seed 7 --number 150 [--tier quick]

A mutant changes one comparison, operator, constant or statement. It is run against the
tests that the map names for its line: cheapest first, until one fails. Run `map` again
when tests have changed: this file is then a plugin of pytest, alone or in the workers
of xdist, and sees no lines of other processes.
"""

import argparse
import ast
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from queue import Queue
from types import CodeType
from typing import Any, NamedTuple

import pytest

from tests.cases import lines

ROOT = Path(__file__).resolve().parents[2]
FILES = lines("mutated.txt")
"""Whose faults would give wrong numbers, or lose a run."""

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=",
    ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in",
    ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*",
    ast.Mod: "+", ast.BitAnd: "|", ast.BitOr: "&", ast.Pow: "*",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum",
         "any": "all", "all": "any"}  # fmt: skip
BUDGET = 120
"""CPU seconds of the tests that are tried, the cheapest first."""
LIMIT = 480
"""Seconds that they may take."""


class Mutant(NamedTuple):
    """Text of a file that another one takes the place of, and where."""

    path: str
    line: int
    begin: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.old!r} -> {self.new!r}"

    def apply(self, text: bytes) -> bytes:
        return text[: self.begin] + self.new.encode() + text[self.end :]


def mutants_of(path: str) -> list[Mutant]:
    """Returns the mutants of a file, without those of annotations and messages."""
    source = (ROOT / path).read_bytes()
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]

    def text(node: ast.AST) -> tuple[int, int, str]:
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        return begin, end, source[begin:end].decode()

    found = []
    for node in _statements(ast.parse(source)):
        begin, end, old = text(node)
        changes = [(begin, end, old, new) for new in _changed(node, old, text, begin)]
        if isinstance(node, ast.If):
            begin, end, old = text(node.test)
            changes.append((begin, end, old, f"not ({old})"))
        found += [Mutant(path, node.lineno, *change) for change in changes]
    return found


def _statements(node: ast.AST) -> Iterator[Any]:
    """Yields the nodes that compute something."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            is_text = isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert)
            if isinstance(child, ast.AST) and not is_text:
                if hasattr(child, "lineno"):
                    yield child
                yield from _statements(child)


def _changed(node: Any, old: str, text: Any, begin: int) -> Iterator[str]:
    """Yields what could stand in a node's place."""

    def between(left: ast.AST, right: ast.AST, new: str) -> str:
        a, b, whole = text(left)[1] - begin, text(right)[0] - begin, old.encode()
        gap = whole[a:b].count(b")"), whole[a:b].count(b"(")
        middle = ")" * gap[0] + f" {new} " + "(" * gap[1]
        return (whole[:a] + middle.encode() + whole[b:]).decode()

    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield between(left, right, COMPARISONS[type(op)])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            yield between(left, right, OPERATORS[type(op)])
        case ast.BoolOp(op=op, values=[left, right]):
            yield between(left, right, "or" if isinstance(op, ast.And) else "and")
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({text(operand)[2]})"
        case ast.IfExp(body=body, orelse=other):
            yield f"({text(other)[2]})"
            yield f"({text(body)[2]})"
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Constant(value=float(value)) if value:
            yield str(value * 2)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if (
            name in CALLS
        ):
            yield old.replace(name, CALLS[name], 1)
        case ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield "pass"
        case ast.Expr(value=ast.Call()):
            yield "pass"


def draw(seed: int, number: int) -> list[Mutant]:
    """Draws mutants, as many of each file as of the others."""
    drawn = random.Random(seed)
    piles = [mutants_of(path) for path in FILES]
    for pile in piles:
        drawn.shuffle(pile)
    drawn.shuffle(piles)
    rounds = [pile[n] for n in range(number) for pile in piles if n < len(pile)]
    return rounds[:number]


def chosen(mutant: Mutant, tests: dict[str, Any], tier: str) -> list[str]:
    """Returns the tests to try, the cheapest first."""
    able = [
        (test["cpu"], name, test["lines"][mutant.path])
        for name, test in tests.items()
        if tier in ("thorough", test["tier"]) and test["lines"].get(mutant.path)
    ]
    # A line at the top of its module runs in no test.
    runs = sorted([test for test in able if mutant.line in test[2]] or able)
    before = accumulate((seconds for seconds, *_ in runs), initial=0.0)
    pairs = zip(runs, before, strict=False)
    return [name for (_, name, _), spent in pairs if spent < BUDGET]


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Returns pytest's exit code, 0 where it takes too long, and what fails first."""
    set_to = "JAX_PLATFORMS=cpu", "OPENBLAS_NUM_THREADS=1", "PYTHONDONTWRITEBYTECODE=1"
    options = "-xq", "-p", "no:cacheprovider", "--timeout=100", "--tb=line"
    command = "env", *set_to, sys.executable, "-mpytest", *options, *tests
    piped = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    try:
        done = subprocess.run(command, cwd=tree, timeout=LIMIT, **piped)
    except subprocess.TimeoutExpired:
        return 0, ""
    lines = done.stdout.splitlines() or [done.stderr[-200:]]
    marks = "FAILED", "ERROR", "Interrupted", "Timeout"
    return done.returncode, next((x for x in lines if x.startswith(marks)), lines[-1])


def try_out(mutant: Mutant, tests: Sequence[str], tree: Path) -> str:
    """Returns the test that fails in a tree with this mutant, "" if all pass."""
    file = tree / mutant.path
    original = file.read_bytes()
    file.write_bytes(mutant.apply(original))
    try:
        code, said = run_tests(tree, tests) if tests else (0, "")
        if code == pytest.ExitCode.USAGE_ERROR:  # it changes names of cases
            files = sorted({name.partition("::")[0] for name in tests})
            code, said = run_tests(tree, files)
    finally:
        file.write_bytes(original)
    return said[:300] if code else ""


def run(options: argparse.Namespace) -> None:
    tests = pickle.loads(options.map.read_bytes())
    mutants = draw(options.seed, options.number)
    print(f"{len(mutants)} mutants, --seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trees: Queue[Path] = Queue()
        for number in range(options.workers):
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs")
            trees.put(shutil.copytree(ROOT, Path(folder, str(number)), ignore=ignored))

        def judge(mutant: Mutant) -> dict[str, Any]:
            tried, tree = chosen(mutant, tests, options.tier), trees.get()
            try:
                killer = try_out(mutant, tried, tree)
            finally:
                trees.put(tree)
            row = {"mutant": str(mutant), "tests": len(tried), "by": killer}
            print(json.dumps(row), flush=True)
            return row

        with ThreadPoolExecutor(options.workers) as pool:
            rows = list(pool.map(judge, mutants))
    killed = sum(bool(row["by"]) for row in rows)
    print(f"{killed} of {len(rows)} killed by the {options.tier} tests")


NAMES = "kernels models data training tasks configs tools train.py"
SOURCE = tuple(f"{ROOT}/{name}" for name in NAMES.split())
TOOL = 4
"""Of `sys.monitoring`."""
LINE_MAP = "ANNULUS_LINE_MAP"
_lines: set[tuple[str, int]] = set()
_tests: dict[str, dict[str, Any]] = {}


def _watch() -> None:
    """Notes the lines that run, but those of functions that an earlier test traced."""
    monitoring, events = sys.monitoring, sys.monitoring.events

    def on_start(code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(SOURCE):
            monitoring.set_local_events(TOOL, code, events.LINE)
        return monitoring.DISABLE

    def on_line(code: CodeType, number: int) -> Any:
        _lines.add((code.co_filename.removeprefix(f"{ROOT}/"), number))
        return monitoring.DISABLE

    monitoring.use_tool_id(TOOL, "lines")
    monitoring.register_callback(TOOL, events.PY_START, on_start)
    monitoring.register_callback(TOOL, events.LINE, on_line)
    monitoring.set_events(TOOL, events.PY_START)


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
    place = Path(os.environ[LINE_MAP])
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        place = place.with_suffix(f".{worker}")
    else:
        for part in place.parent.glob(f"{place.stem}.gw*"):
            _tests.update(pickle.loads(part.read_bytes()))
            part.unlink()
    place.write_bytes(pickle.dumps(_tests))


def make_map(options: argparse.Namespace) -> int:
    environment = os.environ | {LINE_MAP: str(options.map.absolute())}
    command = sys.executable, "-m", "pytest", "-q", "-p", "tests.support.mutants"
    return subprocess.run([*command, *options.arguments], env=environment).returncode


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    programs = parser.add_subparsers(required=True)
    mapping = programs.add_parser("map", help="run tests, and keep their lines")
    mapping.add_argument("map", type=Path)
    mapping.add_argument("arguments", nargs=argparse.REMAINDER)
    mapping.set_defaults(run=make_map)
    running = programs.add_parser("run", help="draw mutants, and run their tests")
    running.add_argument("map", type=Path)
    running.add_argument("--seed", type=int, default=7)
    running.add_argument("--number", type=int, default=150)
    running.add_argument("--tier", choices=("quick", "thorough"), default="thorough")
    running.add_argument("--workers", type=int, default=os.cpu_count())
    running.set_defaults(run=run)
    options = parser.parse_args()
    return options.run(options)


if __name__ == "__main__":
    sys.exit(main())
elif LINE_MAP in os.environ:
    _watch()
