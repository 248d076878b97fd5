"""Rewards of a task, computed from the physics of episodes gathered for another."""

import numpy as np

from data.agents.environments import Environment
from data.agents.episodes import Episode

# Rows whose observation, and whose next physics, are computed again.
CHECKED_ROWS = 5


def computed_rewards(
    environment: Environment, episode: Episode, with_action: bool = True
) -> np.ndarray:
    """Rewards as the environment gave, or would have given them: float64 (T,).

    with_action: False for ExoRL's own code, which leaves the action out. Rewards that
      depend on it, as a cart-pole's, are up to a quarter higher there.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    rewards = []
    steps = zip(episode.physics[1:], episode.action[1:], strict=True)
    for state, action in steps:
        environment.set_physics(state)
        if with_action:
            environment.set_control(action)
        rewards.append(environment.reward())
    return np.array(rewards)


def observation_error(environment: Environment, episode: Episode) -> float:
    """Returns the largest difference of observations from physics, in a few rows.

    It is small for the environment's own domain and model, and for no other.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    columns, differences = environment.recomputable, []
    for row in np.linspace(0, episode.steps, CHECKED_ROWS).astype(int):
        environment.set_physics(episode.physics[row])
        difference = environment.observation() - episode.observation[row]
        differences.append(np.abs(difference[columns]))
    # Not a number where physics are beyond numbers, as `max` of Python's is not.
    return float(np.max(differences))


def physics_error(environment: Environment, episode: Episode) -> float:
    """Returns the largest difference of physics from what a step makes, in a few rows.

    It is small for the world that the episode is of, and for no other: observations
    and rewards do not tell worlds apart.

    Raises:
      ValueError: the simulator refuses a state of the episode.
    """
    differences = []
    for row in np.linspace(0, episode.steps - 1, CHECKED_ROWS).astype(int):
        after = environment.next_physics(episode.physics[row], episode.action[row + 1])
        differences.append(np.abs(after - episode.physics[row + 1]))
    return float(np.max(differences))
