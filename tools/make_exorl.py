"""Makes data for in-context RL in ExoRL's format, with dm_control, in minutes.

    python -m tools.make_exorl --domain cartpole --output DATA
    python -m tools.make_exorl --domain walker --tasks stand run --episodes 500 \\
        --cap 0.6 --output DATA
    python -m tools.pack_exorl --root DATA --domain cartpole --algorithm es_replay \\
        --task swingup --cache CACHE

What is written, DATA/DOMAIN/es_replay/, is not ExoRL: no exploration algorithm gathered
it. A search for good policies, by an evolution strategy, keeps all that it tries. Most
episodes are new ones of policies drawn evenly from the whole range of returns that it
found, with some noise; the rest are noise alone. Rewards are those of the first
task; tools/pack_exorl.py computes the others'. The same seed makes the same files.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.command_line import Parser, as_program, at_least, share
from tools.lib.exorl.replay import SEARCH_EPISODES, TASKS, Recipe, describe, make


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--domain", required=True, choices=list(TASKS))
    add("--output", required=True, type=Path, help="directory of data sets")
    add("--tasks", nargs="+", metavar="TASK", help="default: those of ExoRL's paper")
    add("--episodes", default=300, type=at_least(1), help="default: %(default)s")
    add("--seed", default=0, type=at_least(0), help="default: %(default)s")
    add("--search-episodes", type=at_least(1), help=f"default: {SEARCH_EPISODES}")
    add(
        "--noise-share",
        default=0.2,
        type=share,
        help="share of the episodes that are noise alone (default: %(default)s)",
    )
    add("--cap", type=float, help="keep returns below this share of the best")
    add(
        "--action-repeat",
        default=1,
        type=at_least(1),
        help="steps that every action is held for (default: %(default)s)",
    )
    add(
        "--processes",
        default=os.cpu_count(),
        type=at_least(1),
        help="default: one for each core (%(default)s)",
    )
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    recipe = Recipe(
        domain=chosen.domain,
        tasks=tuple(chosen.tasks or TASKS[chosen.domain]),
        episodes=chosen.episodes,
        seed=chosen.seed,
        search_episodes=chosen.search_episodes or SEARCH_EPISODES[chosen.domain],
        noise_share=chosen.noise_share,
        cap=chosen.cap,
        action_repeat=chosen.action_repeat,
    )
    buffer = make(recipe, chosen.output, chosen.processes)
    print(describe(buffer))


if __name__ == "__main__":
    sys.exit(main())
