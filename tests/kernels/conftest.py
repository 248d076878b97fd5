"""What tests of several kernels share."""

import pytest

from kernels import ring


@pytest.fixture
def hops_in_a_loop(monkeypatch):
    """Rings of more than 3 as loops: every copy of a step takes long to compile."""
    monkeypatch.setattr(ring, "UNROLLED_HOPS", 2)
    monkeypatch.setattr(ring, "HOPS_A_TURN", 1)
