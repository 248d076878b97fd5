"""Prints how densely the source is written, and refuses folded assignments.

A folded assignment gives several names unrelated values: `a, b = f(x), g(y)`. Two
statements are two lines. Swaps, constants, and fields of one object are fine.

The table has, by folder, lines of code (no blanks, comments or docstrings), and of
each 1,000 of these: folded assignments, calls with a starred argument, comprehensions;
and the share of all lines that are comments. `make lint` runs it.

    python -m tests.support.density
"""

import ast
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = (
    "kernels/ring",
    "kernels",
    "models",
    "data",
    "training",
    "tasks",
    "configs",
    "tools",
    "train.py",
)
COMPREHENSIONS = ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp


@dataclass
class Count:
    """What files have of each kind; folded: places, as FILE:LINE."""

    lines: int = 0
    code: int = 0
    comments: int = 0
    starred: int = 0
    comprehensions: int = 0
    folded: list[str] = field(default_factory=list)

    def add(self, path: Path) -> None:
        """Counts a file of Python."""
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and _is_text(node.value):
                docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
            if isinstance(node, ast.Call):
                self.starred += any(isinstance(x, ast.Starred) for x in node.args)
            self.comprehensions += isinstance(node, COMPREHENSIONS)
            if isinstance(node, ast.Assign) and is_folded(node):
                self.folded.append(f"{path}:{node.lineno}")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            text = line.strip()
            self.lines += 1
            self.comments += text.startswith("#") and number not in docstrings
            is_code = text and not text.startswith("#") and number not in docstrings
            self.code += bool(is_code)

    def row(self, name: str) -> str:
        thousands = self.code / 1000 or 1
        return (
            f"{name:14}{self.code:8}"
            f"{len(self.folded) / thousands:8.1f}"
            f"{self.starred / thousands:8.1f}"
            f"{self.comprehensions / thousands:8.1f}"
            f"{100 * self.comments / (self.lines or 1):8.1f}%"
        )


def is_folded(node: ast.Assign) -> bool:
    """Returns whether a statement assigns values that have nothing to do with it.

    A swap names a target among its values; constants and fields of one object are one
    thing in several parts.
    """
    target = node.targets[0]
    values = node.value
    if not isinstance(target, ast.Tuple) or not isinstance(values, ast.Tuple):
        return False
    named = {ast.unparse(part) for part in target.elts}
    if named & {ast.unparse(value) for value in values.elts}:
        return False
    if all(isinstance(value, ast.Constant) for value in values.elts):
        return False
    owners = {
        ast.unparse(value.value) if isinstance(value, ast.Attribute) else None
        for value in values.elts
    }
    return None in owners or len(owners) > 1


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def count(folder: str) -> Count:
    """Counts the files of a folder, or one file, that git knows."""
    command = ["git", "ls-files", "-z", folder]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    total = Count()
    for name in listed.stdout.split("\0"):
        if name.endswith(".py") and Path(name).exists():
            total.add(Path(name))
    return total


def main() -> int:
    heads = "folded", "starred", "compr."
    print(
        f"{'per 1,000':14}{'code':>8}", *(f"{h:>8}" for h in heads), "   comm.", sep=""
    )
    folded = []
    for folder in FOLDERS:
        counted = count(folder)
        print(counted.row(folder))
        folded += counted.folded
    for place in sorted(set(folded)):
        print(f"{place}: two values that have nothing to do with each other: two lines")
    return 1 if folded else 0


if __name__ == "__main__":
    sys.exit(main())
