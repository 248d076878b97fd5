"""The import arrows of the tree, read from the source of every module.

Every import counts: inside functions, under `if TYPE_CHECKING`, relative, and by name
(`import_module("jax")`). The standard library is open to all.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each folder may import. A folder that is not named here may hold no module.
ALLOWED = {
    "configs": {"configs", "ml_collections"},
    "kernels": {"kernels", "jax", "jaxlib", "numpy"},
    "models": {"models", "flax", "jax", "numpy"},
    "data": {
        "data",
        "grain",
        "kernels.layouts",
        "kernels.masks",
        "numpy",
        "sentencepiece",
        "tokenizers",
        "tqdm",
    },
    "training": {
        "training",
        "data.batch",
        "absl",
        "jax",
        "numpy",
        "optax",
        "orbax",
        "tensorboard",
    },
}

# These import whatever is installed, and of the tree what is named.
LIBRARY = set(ALLOWED)
PROGRAMS = {
    "tasks": LIBRARY | {"tasks"},
    "train.py": LIBRARY | {"tasks"},
    "tools": LIBRARY | {"tasks", "tools"},
    "tests": LIBRARY | {"tasks", "tests", "tools", "train"},
}

# Heavy and for one kind of host: of the library these alone may import them, lazily.
TRITON = {"jax_triton", "triton"}
TRITON_FILES = {"kernels/triton_gpu/launch.py", "kernels/triton_gpu/kernels.py"}
# The same for the simulator: packed data are read where it is not installed.
SIMULATOR = {"dm_control", "mujoco"}
SIMULATOR_FILES = {"data/environments.py"}

OURS = LIBRARY | {"tasks", "tests", "tools", "train"}


class Violation(NamedTuple):
    """An import against the arrows; `str` gives file, line and arrow."""

    file: str
    line: int
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.source} -> {self.target}"


def list_modules(root: Path) -> Iterator[Path]:
    """Yield the paths, relative to `root`, of all modules outside hidden folders."""
    for entry in sorted(root.iterdir()):
        if entry.name.startswith("."):
            continue
        files = sorted(entry.rglob("*.py")) if entry.is_dir() else [entry]
        yield from (file.relative_to(root) for file in files if file.suffix == ".py")


def list_imports(source: str, file: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of everything that `source` imports."""
    for node in ast.walk(ast.parse(source, filename=str(file))):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                parents = file.parts[: len(file.parts) - node.level]
                prefix = [*parents] if node.level else []
                prefix += [node.module] if node.module else []
                for alias in node.names:
                    yield node.lineno, ".".join([*prefix, alias.name])
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name),
                args=[ast.Constant(value=str(target)), *_],
            ) if name in {"import_module", "__import__"}:
                yield node.lineno, target


def is_within(target: str, allowed: set[str]) -> bool:
    """Whether dotted name `target` is one of `allowed` or inside one of them."""
    return any(target == name or target.startswith(f"{name}.") for name in allowed)


def is_allowed(file: Path, target: str) -> bool:
    """Whether the module at `file`, relative to the root, may import `target`."""
    folder, package = file.parts[0], target.split(".")[0]
    if package in sys.stdlib_module_names:
        return True
    if package in TRITON:
        return folder == "tests" or file.as_posix() in TRITON_FILES
    if package in SIMULATOR:
        return folder == "tests" or file.as_posix() in SIMULATOR_FILES
    if folder in PROGRAMS:
        return package not in OURS or is_within(target, PROGRAMS[folder])
    return is_within(target, ALLOWED.get(folder, set()))


def find_violations(root: Path) -> list[Violation]:
    """Return every import under `root` that the arrows do not allow.

    A module outside the folders named above is one too, with the target "nowhere".
    """
    violations = []
    for file in list_modules(root):
        folder = file.parts[0]
        if folder not in ALLOWED | PROGRAMS:
            violations.append(Violation(str(file), 1, folder, "nowhere"))
            continue
        source = (root / file).read_text(encoding="utf-8")
        violations += (
            Violation(str(file), line, folder, target)
            for line, target in list_imports(source, file)
            if not is_allowed(file, target)
        )
    return violations


def write_module(root: Path, file: str, source: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")


def test_every_import_of_the_tree_follows_the_arrows() -> None:
    assert [str(violation) for violation in find_violations(ROOT)] == []


def test_the_tree_is_really_read() -> None:
    modules = {file.as_posix() for file in list_modules(ROOT)}
    assert {
        "kernels/layouts.py",
        "kernels/masks.py",
        "tests/test_imports.py",
    } <= modules
    assert not any(name.startswith(".venv") for name in modules)
    layout = ROOT / "kernels/layouts.py"
    targets = {name for _, name in list_imports(layout.read_text("utf-8"), layout)}
    assert any(is_within(target, {"jax", "numpy"}) for target in targets)


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("models/llama.py", "import kernels.ring", "1: models -> kernels.ring"),
        ("models/llama.py", "from ..data import text", "1: models -> data.text"),
        ("kernels/ring.py", "\n\nimport jax, optax", "3: kernels -> optax"),
        ("kernels/ring.py", "def f():\n import flax", "2: kernels -> flax"),
        ("kernels/ring.py", "import jax_triton", "1: kernels -> jax_triton"),
        ("tools/bench.py", "import triton", "1: tools -> triton"),
        ("data/exorl.py", "import dm_control", "1: data -> dm_control"),
        ("tools/rollout.py", "from mujoco import viewer", "1: tools -> mujoco.viewer"),
        ("tools/bench.py", "import train", "1: tools -> train"),
        ("tools/bench.py", "from tests import text", "1: tools -> tests.text"),
        ("training/step.py", "import models.llama", "1: training -> models.llama"),
        (
            "training/step.py",
            "import ml_collections as m",
            "1: training -> ml_collections",
        ),
        ("data/text.py", "import jax.numpy as jnp", "1: data -> jax.numpy"),
        ("data/text.py", "from kernels import *", "1: data -> kernels.*"),
        (
            "data/text.py",
            "from kernels import layouts, ring",
            "1: data -> kernels.ring",
        ),
        (
            "data/text.py",
            "import importlib\nimportlib.import_module('jax')",
            "2: data -> jax",
        ),
        ("configs/base.py", "import jax", "1: configs -> jax"),
        ("train.py", "from tools import bench", "1: train.py -> tools.bench"),
        ("kernels/ring.py", "import tasks.base", "1: kernels -> tasks.base"),
        ("scratch/new.py", "", "1: scratch -> nowhere"),
        ("setup.py", "", "1: setup.py -> nowhere"),
    ],
)
def test_a_violation_is_named_with_file_line_and_arrow(
    tmp_path: Path, file: str, source: str, complaint: str
) -> None:
    write_module(tmp_path, file, source)
    assert [str(found) for found in find_violations(tmp_path)] == [
        f"{file}:{complaint}"
    ]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("configs/tiny.py", "import ml_collections\nfrom configs import base"),
        ("kernels/ring.py", "import math\nfrom . import merge\nimport jax.numpy"),
        (
            "kernels/triton_gpu/launch.py",
            "def f():\n import jax_triton, triton.language",
        ),
        ("models/llama.py", "from flax import nnx\nfrom models.losses import loss"),
        ("data/text.py", "from kernels import layouts\nfrom kernels.masks import full"),
        ("data/text.py", "def f():\n    import sentencepiece"),
        ("data/environments.py", "def f():\n from dm_control import suite"),
        ("training/step.py", "import optax, tensorboard\nfrom training import mesh"),
        ("train.py", "import ml_collections, kernels.ring, models.llama, data.text"),
        ("tools/bench.py", "import torch, matplotlib\nfrom kernels.cases import CASES"),
        ("tests/test_train.py", "import train, tools.bench\nfrom tests import rings"),
        (".venv/lib/any.py", "import anything"),
    ],
)
def test_what_the_arrows_allow_passes(tmp_path: Path, file: str, source: str) -> None:
    write_module(tmp_path, file, source)
    assert find_violations(tmp_path) == []
