"""Rolls out an agent: several episodes in one context, and controls.

    python -m tools.evaluate exorl --workdir=runs/exorl_tiny/cartpole/at \\
        --output results/cpu/exorl_cartpole_at.json
    python -m tools.evaluate exorl --workdir=runs/icrl/dark_room/10x10/dpt \\
        --environments 20 --episodes 6 --temperature 2 ...

The newest checkpoint of config.workdir acts in the environments of the trajectories'
task, and every episode is conditioned on the best return that was recorded in its
world, or trained on where there is one. Contexts are:

    own       the agent's own episodes, one after the other, in one context
    empty     every episode begins with an empty context: what is gained by context
              must be lost here. All that there is for models of single episodes
    other     the agent's own episodes in another world, of many; then one in the row's
    random_N  N episodes of actions drawn evenly, read at once through the ring; then
              one of the agent's (--random N ...)

Where trajectories are of many worlds, agents act in those of the test (--split: in
others, as to choose a temperature).

Papers report the best of n episodes; first, last and mean are given too, with their
bootstrap intervals (95 %) over the worlds, or the environments of one. Seeds of all
episodes are written, and equal for all agents and contexts.
`tools.figures` draws it, and prints what the last own episode got above others.
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

from data.agents import environments
from data.agents.chains import SPLITS, STD_FLOOR, ChainBatch
from data.agents.dark_room import ROOMS, DarkRoom
from data.agents.episodes import DOMAINS
from data.agents.trajectory_file import TrajectoryFile
from data.progress import print_above, progress
from tasks import exorl, trajectories
from tasks.command_line import CONFIG_FLAGS, Parser, as_program, at_least
from tasks.exorl import AgentRun
from tasks.generation import config_to_ask, newest_parameters
from tools.lib.benchmarks.rows import Environment, check_output
from tools.lib.exorl.agents import Actor, actor, chance
from tools.lib.exorl.play import Context, Play, contexts
from tools.lib.exorl.scores import of_worlds, scores
from tools.lib.files import write_json
from training.saved.weights import SavedParameters


def check(config: ml_collections.ConfigDict, options: argparse.Namespace) -> None:
    """Raises ValueError if something in the options or the config is wrong."""
    if config.task != "exorl":
        raise ValueError(
            f'config.task must be "exorl", got {config.task!r}: give such a config'
        )
    agent = config.agent
    longest = _longest(options)
    if agent.chain_length == 1:
        for option in ("random", "window"):
            if getattr(options, option):
                raise ValueError(
                    f"--{option} is for agents of several episodes in a context"
                )
    elif agent.reads_positions:
        if longest > agent.chain_length:
            drawn = longest - 1 in options.random
            given = f"--random {longest - 1}" if drawn else f"--episodes {longest}"
            raise ValueError(
                f"{given} are more than the agent was trained with: "
                f"{config.agent.chain_length=}"
            )


def _check_limit(config: ml_collections.ConfigDict, limit: int | None) -> None:
    """Raises ValueError if episodes of an environment may be longer than an agent's."""
    if limit is not None and limit > config.agent.episode_steps:
        raise ValueError(
            f"{config.agent.episode_steps=} must be at least {limit}, as the "
            "environment's episodes may have more steps than the recorded ones: train "
            f"the agent with config.agent.episode_steps={limit}"
        )


def _longest(options: argparse.Namespace) -> int:
    """Returns the most episodes in a context."""
    own = min(options.episodes, options.window or options.episodes)
    return max([own, *(count + 1 for count in options.random)])


def evaluate(
    config: ml_collections.ConfigDict,
    options: argparse.Namespace,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Returns what is written: returns and scores by context, and their origin.

    Raises:
      ValueError, FileNotFoundError: as `check` and `contexts`, or there is no
        checkpoint.
      ImportError: dm_control is missing.
    """
    check(config, options)
    file = trajectories.opened(config)
    size = options.environments, options.episodes
    seeds = np.random.default_rng(options.seed).integers(2**31, size=size)
    # Also worlds without an episode among the best, of which an agent reads none.
    worlds = np.unique(file.worlds[trajectories.of_split(config, file, options.split)])
    # Dark Room's neighbours have numbers next to each other.
    np.random.default_rng(exorl.HELD_OUT_SEED).shuffle(worlds)
    asked = ["empty"] if config.agent.chain_length == 1 else options.contexts
    trusted = options.trust_entry_point
    needed = contexts(file, worlds, seeds, options.random, asked, trusted)
    _check_limit(config, next(iter(needed.values())).scenes[0][0].limit)
    run = AgentRun.of(config, jax.devices())
    agent, origin = _agent(run, options, file)
    of_rows = np.resize(worlds, size[0])
    targets = _targets(config, file, of_rows)
    play = Play(agent, file, targets, options.window)
    step = origin["step"]
    task = f"{file.index['domain']} {file.index['task']}"
    target = float(targets.mean())
    say(f"step {step} of {config.workdir} on {task}, target {target:.1f}")
    say(f"a context takes {agent.device_bytes / 1e6:,.1f} MB on each device")
    # Rows of one world depend on each other; of a lone world, all are apart.
    rows = np.arange(size[0]) if len(worlds) == 1 else of_rows
    outcomes = {}
    with progress(_num_episodes(file, needed), " episodes") as bar:
        play.on_episode = bar.update
        for name, context in needed.items():
            outcomes[name] = _outcome(name, context, play, rows, say)
        references = _references(file, play, needed, of_rows, rows, options.episodes)
    is_suite = file.index["domain"] in DOMAINS
    simulator = environments.versions() if is_suite else {}
    environment = Environment.of(run.partition.mesh.devices.flatten())
    how = "temperature", "hold", "window"
    return {
        "config": config.to_dict(),
        **origin,
        "task": task,
        "target": target,
        **{name: getattr(options, name) for name in how},
        "worlds": of_rows.tolist(),
        "split": options.split,
        "action_repeat": file.action_repeat,
        "references": references,
        "seeds": seeds.tolist(),
        "versions": {"jax": jax.__version__, **simulator},
        "environment": dataclasses.asdict(environment),
        "contexts": outcomes,
    }


def _agent(
    run: AgentRun, options: argparse.Namespace, file: TrajectoryFile
) -> tuple[Actor, dict[str, Any]]:
    """Returns the newest checkpoint, as it acts, and what tells it from others."""
    saved = SavedParameters(run.config.workdir)
    trajectories.check_trained(run.config, saved.settings)
    parameters, step = newest_parameters(run, run.fingerprint(file))
    drawn = {name: getattr(options, name) for name in ("seed", "temperature", "hold")}
    size = {"rows": options.environments, "episodes": _longest(options)}
    digests = {"parameters": saved.digest}
    digests["trajectories"] = trajectories.identify(run.config)[1]
    return actor(run, parameters, **size, **drawn), {"step": step, "digests": digests}


def _targets(
    config: ml_collections.ConfigDict, file: TrajectoryFile, worlds: np.ndarray
) -> np.ndarray:
    """Returns what episodes are conditioned on, float (E,): the best recorded return.

    Of the row's world, as in training the best of a chain is; of one world, of what was
    trained on.
    """
    if not (file.worlds != file.worlds[0]).any():
        trained = file.returns[trajectories.of_split(config, file, "train")]
        return np.full(len(worlds), trained.max())
    return np.array([file.returns[file.worlds == world].max() for world in worlds])


def _num_episodes(file: TrajectoryFile, needed: dict[str, Context]) -> int:
    """Returns how many episodes are played for the contexts, and for references."""
    played = [*needed.values()]
    if file.family and "own" in needed:  # by the two of `_simulated`
        played += 2 * [needed["own"]]
    return sum(len(context.scenes) for context in played)


def _references(
    file: TrajectoryFile,
    play: Play,
    contexts: dict[str, Context],
    worlds: np.ndarray,
    rows: np.ndarray,
    episodes: int,
) -> dict[str, Any]:
    """Returns returns to compare with: of random actions, and of knowing the goal.

    worlds, rows: (E,), of the episodes, and which of them depend on each other.
    """
    if file.index["domain"] == "dark_room":
        return _of_room(ROOMS[file.index["task"]], worlds, episodes)
    return _simulated(file, play, contexts, rows)


def _of_room(room: DarkRoom, worlds: np.ndarray, episodes: int) -> dict[str, Any]:
    """Returns exact mean returns over the worlds (E,) of rows, and an explorer's."""
    goals = room.goals[np.unique(worlds)]
    return {
        "oracle": float(room.best_return(goals).mean()),
        "random": float(room.random_return()[np.unique(worlds)].mean()),
        "explorer": room.explorer_returns(goals, episodes).mean(axis=0).tolist(),
    }


def _simulated(
    file: TrajectoryFile, play: Play, contexts: dict[str, Context], rows: np.ndarray
) -> dict[str, float]:
    """Returns mean returns of random actions, and of a family's expert."""
    if not (file.family and "own" in contexts):
        return {}
    best = file.family.best
    targets = file.targets[rows]

    def knowing(present: ChainBatch) -> np.ndarray:
        spread = file.observation_std + STD_FLOOR
        seen = present.observations * spread + file.observation_mean
        return best(seen, targets).astype(np.float32)

    means = {}
    policies = {"random": chance(play.actor.choose), "oracle": knowing}
    for name, policy in policies.items():
        returns = dataclasses.replace(play, policy=policy).play(contexts["own"])
        means[name] = float(of_worlds(returns, rows).mean())
    return means


def _outcome(
    name: str,
    context: Context,
    play: Play,
    worlds: np.ndarray,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Plays a context and returns its returns and scores; worlds: (E,), of its rows."""
    start = time.monotonic()
    returns = play.play(context)
    own = returns[:, context.before :]
    others = returns[:, : context.before]
    if context.drawn:  # up to a thousand, and alike
        others = others.mean(axis=1, keepdims=True)
    seconds = time.monotonic() - start
    by_episode = " ".join(f"{value:.1f}" for value in own.mean(axis=0))
    say(f"{name:9s} mean return by episode: {by_episode} ({seconds:.0f} s)")
    return {
        "returns": own.round(4).tolist(),
        "recorded_returns": others.round(4).tolist(),
        "scores": scores(own, worlds),
        "cache_bytes_a_device": play.actor.device_bytes,
        "seconds": round(seconds, 1),
    }


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(__doc__, epilog=CONFIG_FLAGS, prog="python -m tools.evaluate exorl")
    add = parser.add_argument
    whole = at_least(1)
    add("--output", required=True, type=Path, help="JSON to write")
    add("--environments", type=whole, default=8, help="default: %(default)s")
    episodes = "in a context (default: %(default)s)"
    add("--episodes", type=whole, default=4, help=episodes)
    temperature = "of drawn actions; 0: the likeliest (default: %(default)s)"
    add("--temperature", type=at_least(0, float), default=1.0, help=temperature)
    hold = "actions that one draw's noise is for: to explore in one direction"
    add("--hold", type=whole, default=1, help=f"{hold} (default: %(default)s)")
    window = "episodes in a context at most, of which the last are read again"
    add("--window", type=at_least(2), help=f"{window} (default: all)")
    add("--contexts", nargs="*", metavar="NAME", help="default: all that there are")
    add("--random", type=whole, nargs="*", default=[], metavar="N")
    add("--seed", type=at_least(0), default=0, help="of the episodes' seeds")
    split = "of the worlds to act in (default: %(default)s)"
    add("--split", choices=SPLITS, default="test", help=split)
    trust = {"action": "append", "default": [], "metavar": "MODULE:NAME"}
    trusted = "code that a recorded environment may run, beside gymnasium's own"
    add("--trust-entry-point", **trust, help=trusted)
    return parser.parse_known_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    options, rest = _options(arguments)
    check_output(options.output)
    config = config_to_ask(rest)
    results = evaluate(config, options, print_above)
    write_json(options.output, results)
    print(f"written to {options.output}")
