"""One undisturbed run for each file of tests, and runs to disturb."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.runs import kept_in, prepare_corpus
from tests.survival.small_run import Small


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where compiled programs are kept, for the files and workers of one `pytest`."""
    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= "programs"
    directory.mkdir(exist_ok=True)
    with kept_in(directory):
        yield directory


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Small:
    run = Small(corpus, tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return run


@pytest.fixture(scope="module")
def truth(undisturbed: Small) -> Any:
    return jax.device_get(undisturbed.state())


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Small:
    return Small(corpus, tmp_path / "run")


@pytest.fixture
def copy(undisturbed: Small, run: Small) -> Small:
    """A run that has the undisturbed one's checkpoints of steps 4 and 8."""
    for step in "4", "8":
        place = Path("checkpoints") / step
        shutil.copytree(undisturbed.workdir / place, run.workdir / place)
    return run
