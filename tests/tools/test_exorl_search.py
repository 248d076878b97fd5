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


def test_both_ways_of_a_direction_begin_alike():
    bowl = Bowl([0.0, 0, 0])
    found = climb(32, bowl)
    assert bowl.seeds[::2] == bowl.seeds[1::2] and len(set(bowl.seeds)) == 16
    np.testing.assert_allclose(found.parameters[::2], -found.parameters[1::2])


def test_search_is_repeatable():
    np.testing.assert_array_equal(climb(96).parameters, climb(96).parameters)
    assert (climb(32, seed=1).parameters != climb(32).parameters).any()


def test_small_searches_spend_what_they_may():
    spent = [len(climb(episodes).returns) for episodes in (1, 2, 9, 31, 32, 60)]
    assert spent == [2, 2, 8, 30, 32, 64]


def test_returns_that_are_all_alike_lead_nowhere():
    flat = SimpleNamespace(returns=lambda family, attempts, what: [0.0] * len(attempts))
    found = search(flat, FAMILY, "task", 64, np.random.default_rng(0))
    assert np.isfinite(found.parameters).all()
    assert abs(found.parameters[32:].mean()) < 0.1


def test_strata_are_tenths_of_the_range():
    returns = np.array([0.0, 100, 5, 9.9, 10.1, 55, 99])
    strata = [part.tolist() for part in stratify(returns, np.inf)]
    assert strata == [[0, 2, 3], [4], [5], [1, 6]]
    capped = [part.tolist() for part in stratify(returns, 60.0)]
    assert capped == [[0, 2], [3, 4], [5]]
    assert [part.tolist() for part in stratify(np.zeros(3), 1.0)] == [[0, 1, 2]]


def test_limit_below_every_return_is_refused():
    with pytest.raises(ValueError, match="none of 2 policies returned 1 or less"):
        stratify(np.array([2.0, 3.0]), 1.0)
