"""Made-up episodes of ExoRL's format, and real ones of a few steps."""

from pathlib import Path

import numpy as np

from data.agents.environments import Environment
from data.agents.episodes import DOMAINS, Buffer, Episode, write_episode


def made_up(path: Path, domain: str, steps: int, seed: int = 0) -> Episode:
    """An episode of random numbers, in the shapes and types of its domain."""
    rng = np.random.default_rng(seed)
    widths = DOMAINS[domain]
    rows = steps + 1
    action = rng.uniform(-1, 1, (rows, widths.action)).astype(np.float32)
    reward = rng.uniform(0, 1, (rows, widths.reward)).astype(np.float32)
    action[0], reward[0] = 0, 0
    return Episode(
        path=path,
        observation=rng.normal(size=(rows, widths.observation)).astype(np.float32),
        action=action,
        reward=reward,
        discount=np.ones((rows, 1), np.float32),
        physics=rng.normal(size=(rows, widths.physics)),
    )


def rolled_out(
    path: Path, environment: Environment, steps: int, seed: int = 0
) -> Episode:
    """The first steps of a real episode, with random actions."""
    rng = np.random.default_rng(seed)
    size = DOMAINS[environment.domain].action
    rows = [(environment.reset(seed), np.zeros(size), 0.0, environment.physics())]
    for _ in range(steps):
        action = rng.uniform(-1, 1, size).astype(np.float32)
        observation, reward, _ = environment.step(action)
        rows.append((observation, action, reward, environment.physics()))
    observation, action, reward, physics = map(np.array, zip(*rows, strict=True))
    return Episode(
        path=path,
        observation=observation,
        action=action.astype(np.float32),
        reward=reward.astype(np.float32)[:, None],
        discount=np.ones((steps + 1, 1), np.float32),
        physics=physics,
    )


def made_up_buffer(root: Path, domain: str, lengths: list[int]) -> Buffer:
    """A buffer of made-up episodes, numbered from 0 on."""
    buffer = Buffer(root, domain, "made_up")
    folder = buffer.directory / "buffer"
    folder.mkdir(parents=True)
    for number, steps in enumerate(lengths):
        path = folder / f"episode_{number:06d}_{steps}.npz"
        write_episode(made_up(path, domain, steps, seed=number))
    return buffer
