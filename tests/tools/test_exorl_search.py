from types import SimpleNamespace

import numpy as np
import pytest

from tools.lib.exorl.search import search, stratify


class Bowl:
    """In the place of a `Roller`: a return falls with the distance from `top`."""

    def __init__(self, top):
        self.top = np.array(top)
        self.seeds = []

    def returns(self, family, attempts, what):
        self.seeds += [attempt.seed for attempt in attempts]
        return [-np.sum((a.parameters - self.top) ** 2) for a in attempts]


FAMILY = SimpleNamespace(start=np.zeros(3), spread=0.2, rate=0.3)


def climb(episodes, bowl=None, seed=0):
    bowl = bowl or Bowl([1.0, -2, 3])
    return search(bowl, FAMILY, "task", episodes, np.random.default_rng(seed))


def test_search_climbs_and_keeps_all_that_it_tried():
    found = climb(640)
    assert found.parameters.shape == (640, 3) and found.returns.shape == (640,)
    first, last = found.returns[:32].mean(), found.returns[-32:].mean()
    assert first < -12 and last > -1
    distances = ((found.parameters - [1, -2, 3]) ** 2).sum(axis=1)
    np.testing.assert_allclose(found.returns, -distances)


def test_returns_that_are_all_alike_lead_nowhere():
    flat = SimpleNamespace(returns=lambda family, attempts, what: [0.0] * len(attempts))
    found = search(flat, FAMILY, "task", 64, np.random.default_rng(0))
    assert np.isfinite(found.parameters).all()
    assert abs(found.parameters[32:].mean()) < 0.1


def test_limit_below_every_return_is_refused():
    with pytest.raises(ValueError, match="none of 2 policies returned 1 or less"):
        stratify(np.array([2.0, 3.0]), 1.0)
