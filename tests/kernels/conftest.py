"""Fixtures of several kernels' tests."""

import pytest

from kernels.ring import loop as ring_loop

pytest.register_assert_rewrite("tests.kernels.backend_suite", "tests.support.steps")


@pytest.fixture
def steps_in_a_loop(monkeypatch):
    """Compiles rings of more than 3 as loops: each copy of a step takes long."""
    monkeypatch.setattr(ring_loop, "UNROLLED_STEPS", 2)
    monkeypatch.setattr(ring_loop, "LOOP_UNROLL", 1)
