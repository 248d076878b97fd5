"""Runs programs in the process of the tests, on its devices."""

import json

import jax
import pytest


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
