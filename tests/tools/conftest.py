"""Runs programs in the process of the tests, on its devices."""

import json

import jax
import pytest

from data import progress
from tools.lib.planning import phases


@pytest.fixture(autouse=True)
def no_earlier_plans(tmp_path, monkeypatch):
    """Keeps what plans took from the home directory."""
    monkeypatch.setattr(phases, "FILE", tmp_path / "plan_seconds.json")


@pytest.fixture
def bars(monkeypatch):
    """What is shown of how far programs are, one bar after the other."""
    shown = []

    class Kept(progress.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            shown.append(self)

    monkeypatch.setattr(progress, "tqdm", Kept)
    return shown


@pytest.fixture(scope="session", autouse=True)
def devices():
    """Starts them before a program asks for more or fewer than other tests need."""
    return jax.devices()


@pytest.fixture(scope="session")
def rows_of(tmp_path_factory):
    """Returns a function that runs a program and returns the rows that it wrote."""

    def run(program, *arguments):
        output = tmp_path_factory.mktemp("benchmark") / "rows.json"
        assert program.main([*arguments, "--output", str(output)]) == 0
        return json.loads(output.read_text())

    return run
