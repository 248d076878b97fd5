"""Packs episodes of ExoRL for training: checked, with the rewards of a task.

    python -m tools.pack_exorl --root DATASETS --domain walker --algorithm rnd \\
        --task run --cache CACHE

reads DATASETS/walker/rnd/buffer/*.npz, as ExoRL's archives lie when they are unzipped
(https://dl.fbaipublicfiles.com/exorl/DOMAIN/ALGORITHM.zip), and writes
CACHE/walker/rnd/run/.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from data.agents import exorl
from data.agents.episodes import DOMAINS, Buffer
from tasks.command_line import Parser, as_program, at_least


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--root", required=True, type=Path, help="directory of data sets")
    add("--domain", required=True, choices=list(DOMAINS))
    add("--algorithm", required=True, help="rnd, proto, …, or scripted")
    add("--task", required=True, help="whose rewards are computed: run, swingup, …")
    add("--cache", required=True, type=Path, help="directory of packed trajectories")
    rewards = "rewards as the environment gives them, or as ExoRL's own code computes "
    rewards += f"them, without the action {default}"
    add("--relabelling", default="exact", choices=exorl.RELABELLINGS, help=rewards)
    skip = f"skip: leave bad files out, up to 1 %% of them {default}"
    add("--on-bad", default="error", choices=exorl.ON_BAD, help=skip)
    most = f"steps to take, whole episodes by their numbers {default}, which is ExoRL's"
    add("--max-transitions", default=exorl.MAX_TRANSITIONS, type=at_least(1), help=most)
    held = f"steps that actions were held for, which become one {default}"
    add("--action-repeat", default=1, type=at_least(1), help=held)
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    names = [field.name for field in fields(exorl.Selection)]
    selection = exorl.Selection(**{name: getattr(chosen, name) for name in names})
    buffer = Buffer(chosen.root, chosen.domain, chosen.algorithm)
    packed = exorl.pack(buffer, chosen.task, chosen.cache, selection)
    print(exorl.describe(packed))


if __name__ == "__main__":
    sys.exit(main())
