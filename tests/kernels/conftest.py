"""Fixtures of several kernels' tests."""

import pytest

from kernels.ring import comm as ring_comm

pytest.register_assert_rewrite("tests.kernels.backend_suite", "tests.steps")


@pytest.fixture
def steps_in_a_loop(monkeypatch):
    """Compiles rings of more than 3 as loops: each copy of a step takes long."""
    monkeypatch.setattr(ring_comm, "UNROLLED_STEPS", 2)
    monkeypatch.setattr(ring_comm, "LOOP_UNROLL", 1)
