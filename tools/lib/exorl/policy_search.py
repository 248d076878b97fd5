"""An evolution strategy that forgets nothing: it finds policies of every quality."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.agents.hidden_physics import HiddenPhysics
from tools.lib.exorl.controller import controller
from tools.lib.exorl.rollouts import Policy

# Tried in a step, each forwards and backwards; the better half of them count.
DIRECTIONS = 16
BINS = 10


@dataclass(frozen=True, eq=False)
class Family:
    """A kind of policies.

    start: float (parameters,), where a search begins.
    spread, rate: how far it looks around, and how far it goes in a step.
    policy: from parameters (parameters,) to their policy.
    """

    start: np.ndarray
    spread: float
    rate: float
    policy: Callable[[np.ndarray], Policy]


@dataclass(frozen=True, eq=False)
class Found:
    """All policies that a search has tried.

    parameters: float (policies, parameters).
    returns: float (policies,), of one episode each.
    """

    parameters: np.ndarray
    returns: np.ndarray


def linear(mean: np.ndarray, std: np.ndarray, parameters: np.ndarray) -> Policy:
    """Returns tanh of a matrix times standardised observations.

    mean, std: float (observation size,).
    """
    matrix = parameters.reshape(-1, len(mean) + 1)
    weights = matrix[:, :-1] / std
    bias = matrix[:, -1] - weights @ mean
    return lambda observation: np.tanh(weights @ observation + bias)


def believing(action_repeat: int, parameters: np.ndarray) -> Policy:
    """Returns a cart-pole's controller that believes in other physics.

    parameters: logarithms of strength, masses and length, cut to [-2, 2].
    """
    shares = np.exp(np.clip(parameters, -2, 2)).tolist()
    return controller(HiddenPhysics(1, *shares), action_repeat)


def search(
    returns_of: Callable[[np.ndarray, np.ndarray], list[float]],
    family: Family,
    episodes: int,
    rng: np.random.Generator,
) -> Found:
    """Climbs from the family's start, as augmented random search does (1803.07055).

    Args:
      returns_of: from policies (n, parameters) and the seeds of their episodes (n,)
        to their returns, which are to grow.
      family: of the policies.
      episodes: about how many to spend, one for each policy, and at least two.
      rng: draws directions, and the episodes' seeds.
    """
    center = family.start
    count = max(min(DIRECTIONS, episodes // 2), 1)
    steps = max(round(episodes / (2 * count)), 1)
    tried, returns = [], []
    for _ in range(steps):
        directions = rng.normal(size=(count, len(center)))
        # The two policies of a direction begin alike.
        seeds = np.repeat(rng.integers(2**31, size=count), 2)
        offsets = family.spread * np.stack([directions, -directions], axis=1)
        policies = center + offsets.reshape(2 * count, -1)
        found = returns_of(policies, seeds)
        tried.append(policies)
        returns.append(found)
        center = center + _climb(directions, np.reshape(found, (-1, 2)), family.rate)
    return Found(np.concatenate(tried), np.concatenate(returns))


def _climb(directions: np.ndarray, returns: np.ndarray, rate: float) -> np.ndarray:
    """Returns the step to take from returns forwards and backwards (directions, 2)."""
    half = -(-len(returns) // 2)
    best = np.argsort(returns.max(axis=1), kind="stable")[-half:]
    slopes = returns[best, 0] - returns[best, 1]
    spread = returns[best].std()
    if not spread:
        return np.zeros(directions.shape[1])
    return rate / spread * (slopes[:, None] * directions[best]).mean(axis=0)


def stratify(returns: np.ndarray, limit: float) -> list[np.ndarray]:
    """Returns the policies in each tenth of the range of returns up to a limit.

    Tenths without a policy are left out.

    Raises:
      ValueError: no return is within the limit.
    """
    allowed = np.flatnonzero(returns <= limit)
    if not allowed.size:
        raise ValueError(
            f"none of {len(returns)} policies returned {limit:.3g} or less, the best "
            f"{returns.max():.3g}: raise the cap or search longer"
        )
    within = returns[allowed]
    edges = np.linspace(within.min(), within.max(), BINS + 1)[1:-1]
    place = np.searchsorted(edges, within, side="right")
    return [allowed[place == tenth] for tenth in np.unique(place)]
