"""Contexts of Ring Attention's table 5 on described v5e: which systems hold them."""

import pytest

from tools.plan_exorl import plan
from tools.plan_step import described_pod

# system, trajectories, shares of the heads at a time: GiB of a device that has 15.75.
HELD = {("blockwise", 32, 4): 13.4, ("striped", 128, 1): 7.9}
REFUSED = [("vanilla", 32, 1), ("memory_efficient", 32, 1), ("blockwise", 128, 4)]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # the ring's eight hops of either pass are compiled
@pytest.mark.parametrize("case", HELD, ids=str)
def test_blockwise_holds_32_trajectories_and_a_ring_of_8_holds_128(case):
    row = plan(described_pod("v5e:2x4"), *case)
    assert row["refusal"] is None and row["parameters"] == 303_503_366
    assert row["peak_gib"] == pytest.approx(HELD[case], rel=0.05)
    assert row["devices"] == (8 if case[0] == "striped" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_larger_ones_are_refused(case):
    row = plan(described_pod("v5e:2x4"), *case)
    assert row["peak_gib"] is None and "does not fit: it takes" in row["refusal"]
