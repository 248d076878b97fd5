"""Makes exploratory episodes in ExoRL's format, with dm_control, in minutes.

    python -m tools.make_exorl --domain walker --output DATA
    python -m tools.pack_exorl --root DATA --domain walker --algorithm scripted \\
        --task stand --cache CACHE

What is written, DATA/DOMAIN/scripted/, is not ExoRL: no exploration algorithm gathered
it. Actions are noise, of a colour and a strength drawn for each episode; a point mass
walks to places that are drawn too. Rewards are those of the domain's first task;
tools/pack_exorl.py computes the others'. The same seed makes the same files.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.agents import environments
from data.agents.environments import FARTHEST_GOAL, Environment
from data.agents.episodes import DOMAINS, Buffer, Episode, write_episode
from data.files import new_directory
from data.progress import progress
from data.remote import as_path
from tasks.command_line import Parser, as_program, at_least

ALGORITHM = "scripted"
EXPONENTS = 0.0, 1.0, 2.0
"""Of noise, whose power falls with frequency: white, pink, red."""
SCALES = 0.3, 1.0
"""Standard deviations of noise."""
NEAR, ROAMING, NOISE = 0.1, 0.03, 0.3
"""Metres from its aim at which a point mass slows down; the most chance of
another aim; share of noise."""
MOST_STEPS = 1000
"""No episode of ExoRL is longer."""


def make(
    output: Path, domain: str, episodes: int, seed: int, action_repeat: int = 1
) -> Buffer:
    """Writes `output`/domain/scripted, whole or not at all.

    action_repeat: steps that every action is held for; all are in the episode.

    Raises:
      FileExistsError: there is such a data set already; it is not touched.
      ImportError: dm_control is missing.
    """
    recipe = {"episodes": episodes, "seed": seed, "action_repeat": action_repeat}
    buffer = Buffer(output, domain, ALGORITHM)
    with new_directory(buffer.directory) as new:
        folder = new / "buffer"
        folder.mkdir()
        environment = Environment(domain, environments.tasks(domain)[0])
        with progress(episodes, " episodes") as bar:
            for number in range(episodes):
                rng = np.random.default_rng([seed, number])
                write_episode(_record(environment, folder, number, action_repeat, rng))
                bar.update()
        meta = {
            "generator": "tools/make_exorl.py of Annulus: no data of ExoRL",
            "recipe": {"domain": domain} | recipe,
            "stored_task": environment.task,
            "versions": {"numpy": np.__version__} | environments.versions(),
        }
        (new / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return buffer


def _record(
    environment: Environment,
    folder: Path,
    number: int,
    action_repeat: int,
    rng: np.random.Generator,
) -> Episode:
    """Rolls out an episode."""
    size = DOMAINS[environment.domain].action
    noise = draw_noise(rng, rng.choice(EXPONENTS), rng.choice(SCALES), size)
    first = environment.reset(int(rng.integers(2**31)))
    rows = [(first, np.zeros(size, np.float32), 0.0, environment.physics())]
    walks = environment.domain == "point_mass"
    aim = None
    roaming = ROAMING * rng.random()
    for step, wanted in enumerate(noise):
        if step % action_repeat == 0:
            if walks:
                if aim is None or rng.random() < roaming:
                    aim = rng.uniform(-FARTHEST_GOAL, FARTHEST_GOAL, size)
                wanted = (aim - rows[-1][0][:size]) / NEAR + NOISE * wanted
            # The number that is stored is the one that acts.
            action = np.clip(wanted, -1, 1).astype(np.float32)
        result = environment.step(action)
        rows.append((result.observation, action, result.reward, environment.physics()))
        if result.last:
            break
    observation, action, reward, physics = map(np.array, zip(*rows, strict=True))
    return Episode(
        path=folder / f"episode_{number:06d}_{len(rows) - 1}.npz",
        observation=observation,
        action=action,
        reward=reward.astype(np.float32)[:, None],
        discount=np.ones((len(rows), 1), np.float32),
        physics=physics,
    )


def draw_noise(
    rng: np.random.Generator, exponent: float, scale: float, size: int
) -> np.ndarray:
    """Draws noise for the steps of an episode: float (MOST_STEPS, size).

    exponent: of the frequency, with which its power falls. scale: standard deviation of
      each column, whose mean is 0.
    """
    frequency = np.fft.rfftfreq(MOST_STEPS)
    frequency[0] = 1.0
    parts = rng.normal(size=(2, size, len(frequency)))
    spectrum = (parts[0] + 1j * parts[1]) * frequency ** (-exponent / 2)
    spectrum[:, 0] = 0  # the mean
    noise = np.fft.irfft(spectrum, MOST_STEPS).T
    return scale * noise / noise.std(axis=0)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    add = parser.add_argument
    default = "(default: %(default)s)"
    known = [domain for domain in DOMAINS if environments.tasks(domain)]
    add("--domain", required=True, choices=known)
    output = "directory of data sets, with or without others"
    add("--output", required=True, type=as_path, help=output)
    held = f"steps that every action is held for {default}"
    add("--action-repeat", type=at_least(1), default=1, help=held)
    add("--episodes", type=at_least(1), default=300, help=default)
    add("--seed", type=at_least(0), default=0, help=f"of all that is drawn {default}")
    buffer = make(**vars(parser.parse_args(arguments)))
    print(f"written to {buffer.directory}")


if __name__ == "__main__":
    sys.exit(main())
