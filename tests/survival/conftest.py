"""One undisturbed run for each file of tests, and runs to disturb."""

import shutil
from pathlib import Path

import jax
import pytest

from tests.survival.small_run import Small


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory, programs):
    run = Small(corpus, tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return run


@pytest.fixture(scope="module")
def truth(undisturbed):
    return jax.device_get(undisturbed.state())


@pytest.fixture
def run(corpus, tmp_path, programs):
    return Small(corpus, tmp_path / "run")


@pytest.fixture
def copy(undisturbed, run):
    """A run that has the undisturbed one's checkpoints of steps 4 and 8."""
    for step in "4", "8":
        place = Path("checkpoints") / step
        shutil.copytree(undisturbed.workdir / place, run.workdir / place)
    return run
