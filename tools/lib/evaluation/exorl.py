"""Rolls out an agent in dm_control: several episodes in one context, and controls.

    python -m tools.evaluate exorl --workdir=runs/exorl_tiny/cartpole/at \\
        --output results/cpu/exorl_cartpole_at.json
    python -m tools.evaluate exorl --workdir=runs/exorl_tiny/walker/at \\
        --other trajectories/walker/es_replay/run --environments 8 --episodes 4 ...

The newest checkpoint of config.workdir acts in the environments of the trajectories'
task, in lock-step, and every episode is conditioned on the best return of the
trajectories (times --target). Contexts are:

    own       the agent's own episodes, one after the other, in one context
    empty     every episode begins with an empty context: what is gained by context
              must be lost here. All that there is for models of single episodes
    recorded  held-out episodes of the trajectories, ascending; then one of the agent's
    other     the same of any trajectories of another task (--other)

Papers report the best of n episodes; first, last and mean are given too, with their
bootstrap intervals (95 %) over the environments. Seeds of all episodes are written, and
equal for all agents and contexts. `tools.figures returns` draws what is written.
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from data import environments
from data.chains import Chains
from data.trajectory_file import TrajectoryFile
from tasks import base, exorl
from tasks.command_line import Parser, as_program, at_least
from tasks.generation import config_to_ask, newest_parameters
from tools.lib.benchmarks.rows import Environment, check_output
from tools.lib.exorl.agents import Play, actor
from tools.lib.exorl.scenes import Recording, Scene, Stage
from tools.lib.exorl.scores import scores
from tools.lib.files import write_json


def scenes(
    stage: Stage, file: TrajectoryFile, recorded: np.ndarray, episodes: int
) -> list[tuple[Scene, int]]:
    """Returns the episodes of a context, each by its number in its scene.

    file, recorded: what goes before, (E, episodes) numbers; then one episode is acted,
      and all of them are where nothing goes before.
    """
    if not recorded.shape[1]:
        return [(stage, number) for number in range(episodes)]
    recording = Recording(file, recorded)
    before = [(recording, number) for number in range(recorded.shape[1])]
    return [*before, (stage, 0)]


def chains_without_the_best(
    file: TrajectoryFile, episodes: np.ndarray, rows: int, length: int
) -> np.ndarray:
    """Returns chains of episodes without the best of each: (rows, length - 1).

    Raises:
      ValueError: there are too few.
    """
    chains = Chains(file, episodes, length, exorl.HELD_OUT_SEED)
    return np.stack([chains.chain(row)[:-1] for row in range(rows)])


Recorded = tuple[TrajectoryFile, np.ndarray]
"""Trajectories, and the numbers of those in a context, (E, episodes)."""


def contexts(
    config: ml_collections.ConfigDict, options: argparse.Namespace
) -> tuple[TrajectoryFile, dict[str, Recorded]]:
    """Returns the trajectories, and what is recorded in each context.

    Raises:
      ValueError, FileNotFoundError: something in the options or the config is wrong.
    """
    if not options.target > 0:
        raise ValueError(f"--target must be above 0, got {options.target}")
    if config.task != "exorl":
        raise ValueError(
            f'config.task must be "exorl", got {config.task!r}: give such a config'
        )
    file = exorl.trajectories(config)
    is_single = config.agent.chain_length == 1
    if is_single and options.other:
        raise ValueError("--other is for agents of several episodes in a context")
    if not is_single and options.episodes > config.agent.chain_length:
        raise ValueError(
            f"--episodes {options.episodes} are more than the agent was trained with: "
            f"{config.agent.chain_length=}"
        )
    size = options.environments, options.episodes
    nothing = file, np.zeros((options.environments, 0), int)
    if is_single:
        return file, {"empty": nothing}
    held_out = exorl.episodes(config, file, "validation")
    recorded = file, chains_without_the_best(file, held_out, *size)
    found = {"own": nothing, "empty": nothing, "recorded": recorded}
    if options.other:
        changed = config.copy_and_resolve_references()
        changed.data.trajectories = str(options.other)
        other = exorl.trajectories(changed)
        every = np.arange(len(other.returns))
        found["other"] = other, chains_without_the_best(other, every, *size)
    return file, found


def evaluate(
    config: ml_collections.ConfigDict,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Returns what is written: returns and scores by context, and their origin.

    Raises:
      ValueError, FileNotFoundError: as `contexts`, or there is no checkpoint.
      ImportError: dm_control is missing.
    """
    file, needed = contexts(config, options)
    rows, episodes = options.environments, options.episodes
    task = file.index["domain"], file.index["task"]
    partition = base.partition(config, jax.devices())
    model = exorl.model(config, partition)
    fingerprint = exorl.fingerprint(model, file)
    parameters, step = newest_parameters(config, partition, model, fingerprint)
    agent = actor(config, partition, parameters, rows=rows, episodes=episodes)
    rng = np.random.default_rng(options.seed)
    seeds = rng.integers(2**31, size=(rows, episodes))
    stage = Stage(
        [environments.Environment(*task) for _ in range(rows)],
        seeds,
        file.action_repeat,
    )
    target = options.target * float(file.returns.max())
    play = Play(agent, file, target)
    say(f"step {step} of {config.workdir} on {' '.join(task)}, target {target:.1f}")
    environment = Environment.of(partition.mesh.devices.flatten())
    outcomes = {}
    for context, (source, recorded) in needed.items():
        start = time.monotonic()
        plan = scenes(stage, source, recorded, episodes)
        returns = play.play(plan, context == "empty").returns
        own = returns[:, recorded.shape[1] :]
        seconds = time.monotonic() - start
        outcomes[context] = {
            "trajectories": f"{source.index['domain']} {source.index['task']}",
            "returns": own.round(4).tolist(),
            "recorded_returns": returns[:, : recorded.shape[1]].round(4).tolist(),
            "scores": scores(own),
            "target_hit_rate": float((own >= target).mean()),
            "seconds": round(seconds, 1),
        }
        by_episode = " ".join(f"{value:.1f}" for value in own.mean(axis=0))
        say(f"{context:9s} mean return by episode: {by_episode} ({seconds:.0f} s)")
    return {
        "config": config.to_dict(),
        "step": step,
        "task": " ".join(task),
        "target": target,
        "action_repeat": file.action_repeat,
        "data_returns": _quantiles(file),
        "seeds": seeds.tolist(),
        "versions": {"jax": jax.__version__, **environments.versions()},
        "environment": dataclasses.asdict(environment),
        "contexts": outcomes,
    }


def _quantiles(file: TrajectoryFile) -> dict[str, float]:
    marks = (0, 50, 90, 100)
    values = np.percentile(file.returns, marks).round(2).tolist()
    return {f"{mark}%": value for mark, value in zip(marks, values, strict=True)}


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(__doc__, prog="python -m tools.evaluate exorl")
    add = parser.add_argument
    add("--output", required=True, type=Path, help="JSON to write")
    add("--environments", type=at_least(1), default=8, help="default: %(default)s")
    add(
        "--episodes",
        type=at_least(1),
        default=4,
        help="in a context (default: %(default)s)",
    )
    add("--target", type=float, default=1.0, help="share of the data's best return")
    add("--other", type=Path, help="trajectories of another task, for its context")
    add("--seed", type=at_least(0), default=0, help="of the episodes' seeds")
    return parser.parse_known_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    options, rest = _options(arguments)
    check_output(options.output)
    config = config_to_ask(rest)
    results = evaluate(config, options, lambda line: print(line, flush=True))
    write_json(options.output, results)
    print(f"written to {options.output}")
