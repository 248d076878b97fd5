"""Scores of agents from the returns of their episodes, with bootstrap intervals."""

from collections.abc import Callable

import numpy as np

RESAMPLES = 10_000
SCORES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "best_of_n": lambda returns: returns.max(axis=1),
    "last": lambda returns: returns[:, -1],
    "mean": lambda returns: returns.mean(axis=1),
    "first": lambda returns: returns[:, 0],
}
"""From returns (E, n) to one number for each environment, (E,)."""


def interval(values: np.ndarray, seed: int = 0) -> dict[str, float]:
    """Returns the mean of values (E,), and the 95 % bounds of bootstrap means.

    values: or (R, E), of R runs in the same environments: both are drawn, runs and
      environments, in a resample.
    """
    rng = np.random.default_rng(seed)
    values = np.atleast_2d(values)
    runs, size = values.shape
    drawn = rng.integers(size, size=(RESAMPLES, size))
    of_runs = rng.integers(runs, size=(RESAMPLES, runs))
    # Means over the runs that were drawn, of which environments are then.
    often = np.eye(runs)[of_runs].mean(axis=1) @ values  # (RESAMPLES, E)
    means = np.take_along_axis(often, drawn, axis=1).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return {"mean": float(values.mean()), "low": float(low), "high": float(high)}


def of_worlds(returns: np.ndarray, worlds: np.ndarray) -> np.ndarray:
    """Returns the mean of the rows of each world, (worlds, …), of returns (E, …).

    Rows of one world are not independent, and would make intervals too narrow.
    """
    each = [returns[worlds == world].mean(axis=0) for world in np.unique(worlds)]
    return np.stack(each)


def scores(returns: np.ndarray, worlds: np.ndarray) -> dict[str, dict[str, float]]:
    """Returns every score of returns (E, n), each with its interval over worlds (E,).

    Rows are scored before their mean is taken: the best of a mean is not the mean best.
    """
    return {
        name: interval(of_worlds(score(returns), worlds))
        for name, score in SCORES.items()
    }
