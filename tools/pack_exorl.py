"""Packs episodes of ExoRL for training: checked, with the rewards of some tasks.

    python -m tools.pack_exorl --root DATASETS --domain walker --algorithm rnd \\
        --task stand walk run --cache CACHE
    python -m tools.pack_exorl --root DATASETS --domain point_mass \\
        --algorithm scripted --task goals --worlds 100 --cache CACHE

The first reads DATASETS/walker/rnd/buffer/*.npz, as ExoRL's archives lie when they are
unzipped (https://dl.fbaipublicfiles.com/exorl/DOMAIN/ALGORITHM.zip), and writes
CACHE/walker/rnd/stand/ and the others. The second writes one file of 100 worlds: the
same steps, with the rewards of 100 tasks that differ in a target. Families of tasks are
goals of a point_mass.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from data.agents import exorl
from data.agents.episodes import DOMAINS, Buffer
from data.remote import as_path
from tasks.command_line import Parser, as_program, at_least


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--root", required=True, type=Path, help="directory of data sets")
    add("--domain", required=True, choices=list(DOMAINS))
    add("--algorithm", required=True, help="rnd, proto, …, or scripted")
    tasks = "whose rewards are computed: run, swingup, goals, …"
    add("--task", required=True, nargs="+", help=tasks)
    add("--cache", required=True, type=as_path, help="directory of packed trajectories")
    most = f"steps to take, whole episodes by their numbers {default}, which is ExoRL's"
    add("--max-transitions", default=exorl.MAX_TRANSITIONS, type=at_least(1), help=most)
    held = f"steps that actions were held for, which become one {default}"
    add("--action-repeat", default=1, type=at_least(1), help=held)
    piece = f"steps, packed, of the pieces that an episode is cut into {default}: none"
    add("--piece", default=0, type=at_least(0), help=piece)
    worlds = f"tasks to draw of a family {default}"
    add("--worlds", default=100, type=at_least(2), help=worlds)
    add("--seed", default=0, type=at_least(0), help=f"of what is drawn {default}")
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    names = [field.name for field in fields(exorl.Selection)]
    selection = exorl.Selection(**{name: getattr(chosen, name) for name in names})
    buffer = Buffer(chosen.root, chosen.domain, chosen.algorithm)
    for packed in exorl.pack(buffer, chosen.task, chosen.cache, selection):
        print(packed.describe())


if __name__ == "__main__":
    sys.exit(main())
