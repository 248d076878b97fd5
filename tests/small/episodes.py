"""Made-up episodes of ExoRL's format, and real ones of a few steps."""

from pathlib import Path

import numpy as np

from data.agents.environments import Environment
from data.agents.episodes import DOMAINS, Buffer, Episode, write_episode


def _episode(path: Path, observation, action, reward, physics) -> Episode:
    action, reward = action.astype(np.float32), reward.astype(np.float32)
    action[0], reward[0] = 0, 0
    discount = np.ones((len(action), 1), np.float32)
    seen = observation.astype(np.float32)
    return Episode(path, seen, action, reward, discount, physics)


def made_up(path: Path, domain: str, steps: int, seed: int = 0) -> Episode:
    """An episode of random numbers, in the shapes and types of its domain."""
    rng, widths, rows = np.random.default_rng(seed), DOMAINS[domain], steps + 1
    action = rng.uniform(-1, 1, (rows, widths.action))
    reward = rng.uniform(0, 1, (rows, widths.reward))
    observation = rng.normal(size=(rows, widths.observation))
    physics = rng.normal(size=(rows, widths.physics))
    return _episode(path, observation, action, reward, physics)


def rolled_out(
    path: Path, environment: Environment, steps: int, seed: int = 0
) -> Episode:
    """The first steps of a real episode, with random actions."""
    rng, size = np.random.default_rng(seed), DOMAINS[environment.domain].action
    rows = [(environment.reset(seed), np.zeros(size), [0.0], environment.physics())]
    for _ in range(steps):
        action = rng.uniform(-1, 1, size).astype(np.float32)
        observation, reward, _ = environment.step(action)
        rows.append((observation, action, [reward], environment.physics()))
    return _episode(path, *map(np.array, zip(*rows, strict=True)))


def rolled_out_buffer(
    root: Path, environment: Environment, lengths: list[int]
) -> Buffer:
    """A buffer of real episodes of an environment, numbered from 0 on."""
    buffer = Buffer(root, environment.domain, "random")
    folder = buffer.directory / "buffer"
    folder.mkdir(parents=True)
    for number, steps in enumerate(lengths):
        path = folder / f"episode_{number:06d}_{steps}.npz"
        write_episode(rolled_out(path, environment, steps, seed=number))
    return buffer
