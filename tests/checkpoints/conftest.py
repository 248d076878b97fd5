"""Three steps of a run, to damage."""

import gc
import shutil

import pytest

from tests.small.states import STEPS, checkpoints, state


@pytest.fixture(scope="module")
def swept():
    """Collects what Orbax leaves behind here, and not in whatever test comes next."""
    yield
    gc.collect()


@pytest.fixture
def logged():
    return []


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Three steps; tests must not change them."""
    directory = tmp_path_factory.mktemp("original") / "checkpoints"
    with checkpoints(directory) as saved:
        for step in STEPS:
            saved.save(step, state(step))
    return directory


@pytest.fixture
def directory(original, tmp_path):
    return shutil.copytree(original, tmp_path / "run" / "checkpoints")
