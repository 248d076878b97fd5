"""Episodes rolled out in dm_control, and what the programs that record them share."""

import argparse
import contextlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from data.agents import environments
from data.agents.environments import Environment, check_simulator
from data.agents.episodes import DOMAINS, Episode
from data.agents.exorl import QUANTILES
from data.files import NewDirectory
from tasks.command_line import Parser, at_least

# No episode of ExoRL is longer; noise is drawn for as many steps.
MOST_STEPS = 1000
EXPONENTS = 0.0, 1.0, 2.0
"""Of noise: white, pink, red."""

# From an observation to an action, before it is cut to [-1, 1].
Policy = Callable[[np.ndarray], np.ndarray]
# The built-in map, or that of a pool of processes.
Map = Callable[..., Iterator[Any]]


@dataclass(frozen=True)
class Noise:
    """Noise whose power falls with frequency: white (0), pink (1) or red (2).

    scale: its standard deviation.
    """

    exponent: float
    scale: float

    def draw(self, rng: np.random.Generator, steps: int, size: int) -> np.ndarray:
        """Draws noise for every step, each column of mean 0: float (steps, size)."""
        frequency = np.fft.rfftfreq(steps)
        frequency[0] = 1.0
        parts = rng.normal(size=(2, size, len(frequency)))
        spectrum = (parts[0] + 1j * parts[1]) * frequency ** (-self.exponent / 2)
        spectrum[:, 0] = 0  # the mean
        noise = np.fft.irfft(spectrum, steps).T
        return self.scale * noise / noise.std(axis=0)


def roll_out(
    environment: Environment,
    act: Policy | None,
    noise: Noise | None,
    seed: int,
    action_repeat: int = 1,
    stem: Path | None = None,
) -> Episode:
    """Rolls out one episode, with the rewards of the environment's task.

    Args:
      environment: where.
      act: what the noise is added to; None: to nothing.
      noise: None for none.
      seed: of the episode's beginning, and of the noise.
      action_repeat: steps that every action is held for; all are in the episode.
      stem: path of the episode's file, up to its length.
    """
    size = DOMAINS[environment.domain].action
    offsets = np.zeros((MOST_STEPS, size))
    if noise is not None:
        offsets = noise.draw(np.random.default_rng(seed), MOST_STEPS, size)
    first = environment.reset(seed)
    rows = [(first, np.zeros(size, np.float32), 0.0, environment.physics())]
    for number, offset in enumerate(offsets):
        if number % action_repeat == 0:
            wanted = offset if act is None else offset + act(rows[-1][0])
            # The number that is stored is the one that acts.
            action = np.clip(wanted, -1, 1).astype(np.float32)
        step = environment.step(action)
        rows.append((step.observation, action, step.reward, environment.physics()))
        if step.last:
            break
    observation, action, reward, physics = map(np.array, zip(*rows, strict=True))
    return Episode(
        path=stem and stem.with_name(f"{stem.name}_{len(rows) - 1}.npz"),
        observation=observation,
        action=action,
        reward=reward.astype(np.float32)[:, None],
        discount=np.ones((len(rows), 1), np.float32),
        physics=physics,
    )


def recording_arguments(
    description: str, episodes: int, action_repeat: int
) -> argparse.ArgumentParser:
    """Returns the arguments that programs which record episodes have in common.

    episodes, action_repeat: their defaults.
    """
    parser = Parser(description)
    for name, least, default, meaning in (
        ("--episodes", 1, episodes, "to record"),
        ("--seed", 0, 0, "of all that is drawn"),
        ("--action-repeat", 1, action_repeat, "steps that every action is held for"),
        ("--processes", 1, os.cpu_count(), "that record; they change nothing"),
    ):
        explained = f"{meaning} (default: %(default)s)"
        parser.add_argument(name, type=at_least(least), default=default, help=explained)
    output = "directory of data sets, with or without others"
    parser.add_argument("--output", required=True, type=Path, help=output)
    return parser


def check_held(action_repeat: int) -> None:
    """Raises ValueError if an episode is over before an action is."""
    if action_repeat > MOST_STEPS:
        raise ValueError(
            f"{action_repeat=} must be at most the {MOST_STEPS} steps of an episode"
        )


@contextlib.contextmanager
def new_data(directory: Path, processes: int) -> Iterator[tuple[Path, Map]]:
    """Yields a folder that takes the directory's name when the block ends, and a map.

    processes: how many the map has.

    Raises:
      FileExistsError: there is such a data set already; it is not touched.
      ImportError: dm_control is missing.
    """
    check_simulator()
    new = NewDirectory(directory)
    try:
        if processes == 1:
            yield new.partial, map
        else:
            # A process that is forked would hold the locks of JAX's threads.
            spawn = get_context("spawn")
            with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
                yield new.partial, pool.map
        new.appear()
    finally:
        new.remove()


def quantiles(returns: Sequence[float]) -> dict[str, float]:
    """Returns the quantiles of returns by name, for a meta.json."""
    values = np.percentile(returns, QUANTILES).round(3).tolist()
    return {f"{q}%": value for q, value in zip(QUANTILES, values, strict=True)}


def write_meta(directory: Path, program: str, recipe: Any, **found: Any) -> None:
    """Writes meta.json: what made a data set, and what came of it.

    recipe: a dataclass; equal ones make the same files.
    """
    meta = {
        "generator": f"{program} of Annulus: no data of ExoRL",
        "recipe": asdict(recipe),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            **environments.versions(),
        },
    }
    text = json.dumps(meta | found, indent=1) + "\n"
    (directory / "meta.json").write_text(text)


def describe(directory: Path) -> str:
    """Describes the returns of a data set, of its meta.json, in a few lines."""
    lines = []
    meta = json.loads((directory / "meta.json").read_text())
    for what, returns in meta["returns"].items():
        row = ", ".join(f"{name} {value:.1f}" for name, value in returns.items())
        lines.append(f"{what}: returns {row}")
    return "\n".join([*lines, f"written to {directory}"])
