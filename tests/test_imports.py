"""The import arrows of the tree, read from the source of every module.

Every import counts: inside functions, under `if TYPE_CHECKING`, relative, and by name
(`import_module("jax")`). The standard library is open to all.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What each folder may import. A folder that is not named here may hold no module.
DATA = "data grain jinja2 kernels.layouts kernels.masks numpy sentencepiece tokenizers"
DATA += " tqdm"
TRAINING = "training data.batch absl etils jax numpy optax orbax tensorboard"
ALLOWED = {
    "configs": {"configs", "ml_collections"},
    "kernels": {"kernels", "jax", "jaxlib", "numpy"},
    "models": {"models", "flax", "jax", "numpy"},
    "data": {*DATA.split()},
    "training": {*TRAINING.split()},
}

# These import whatever is installed, and of the tree what is named.
LIBRARY = {*ALLOWED}
PROGRAMS = {
    "tasks": LIBRARY | {"tasks"},
    "train.py": LIBRARY | {"tasks"},
    "tools": LIBRARY | {"tasks", "tools"},
    "tests": LIBRARY | {"tasks", "tests", "tools", "train"},
}
OURS = PROGRAMS["tests"]

# Heavy, for one kind of host, or absent where packed data are read: beside the tests
# these files alone may import them, lazily.
TRITON_FILES = "kernels/triton_gpu/launch.py", "kernels/triton_gpu/kernels.py"
SIMULATOR_FILES = ("data/environments.py",)
LAZY = dict.fromkeys(("jax_triton", "triton"), TRITON_FILES)
LAZY |= dict.fromkeys(("dm_control", "mujoco"), SIMULATOR_FILES)
LAZY |= {"pyarrow": ("data/row_files.py",)}
LAZY |= {"wandb": ("training/sinks.py",)}


def list_modules(root: Path) -> Iterator[Path]:
    """Return the paths, relative to `root`, of all modules outside hidden folders."""
    files = [*root.glob("[!.]*.py"), *root.glob("[!.]*/**/*.py")]
    return (file.relative_to(root) for file in sorted(files))


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
    if package in LAZY:
        return folder == "tests" or file.as_posix() in LAZY[package]
    if folder in PROGRAMS:
        return package not in OURS or is_within(target, PROGRAMS[folder])
    return is_within(target, ALLOWED[folder])


def find_violations(root: Path) -> list[str]:
    """Return file, line and arrow of every import that the arrows do not allow.

    A module outside the folders named above is one too, with the target "nowhere".
    """
    violations = []
    for file in list_modules(root):
        folder = file.parts[0]
        if folder not in ALLOWED | PROGRAMS:
            violations.append(f"{file}:1: {folder} -> nowhere")
            continue
        for line, target in list_imports((root / file).read_text("utf-8"), file):
            if not is_allowed(file, target):
                violations.append(f"{file}:{line}: {folder} -> {target}")
    return violations


def violations_of(root: Path, file: str, source: str) -> list[str]:
    """Return what is wrong with a tree that holds this module alone."""
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(source, encoding="utf-8")
    return find_violations(root)


def test_every_import_of_the_tree_follows_the_arrows():
    assert find_violations(ROOT) == []


BY_NAME = "import importlib\nimportlib.import_module('jax')"
ML = "ml_collections"
VIOLATIONS = [
    ("models/decoder.py", "import kernels.ring", "1: models -> kernels.ring"),
    ("models/decoder.py", "from ..data import text", "1: models -> data.text"),
    ("kernels/ring.py", "\n\nimport jax, optax", "3: kernels -> optax"),
    ("kernels/ring.py", "def f():\n import flax", "2: kernels -> flax"),
    ("kernels/ring.py", "import jax_triton", "1: kernels -> jax_triton"),
    ("tools/bench.py", "import triton", "1: tools -> triton"),
    ("data/exorl.py", "import dm_control", "1: data -> dm_control"),
    ("tools/rollout.py", "from mujoco import viewer", "1: tools -> mujoco.viewer"),
    ("tools/bench.py", "import train", "1: tools -> train"),
    ("tools/bench.py", "from tests import text", "1: tools -> tests.text"),
    ("training/step.py", "import models.decoder", "1: training -> models.decoder"),
    ("training/step.py", "import ml_collections as m", f"1: training -> {ML}"),
    ("data/text.py", "import jax.numpy as jnp", "1: data -> jax.numpy"),
    ("data/text.py", "from kernels import *", "1: data -> kernels.*"),
    ("data/text.py", "from kernels import layouts, ring", "1: data -> kernels.ring"),
    ("data/text.py", BY_NAME, "2: data -> jax"),
    ("configs/base.py", "import jax", "1: configs -> jax"),
    ("train.py", "from tools import bench", "1: train.py -> tools.bench"),
    ("kernels/ring.py", "import tasks.base", "1: kernels -> tasks.base"),
    ("scratch/new.py", "", "1: scratch -> nowhere"),
    ("setup.py", "", "1: setup.py -> nowhere"),
]


@pytest.mark.parametrize(("file", "source", "complaint"), VIOLATIONS)
def test_a_violation_is_named_by_line_and_arrow(tmp_path, file, source, complaint):
    assert violations_of(tmp_path, file, source) == [f"{file}:{complaint}"]
