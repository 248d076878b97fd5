"""Makes learning histories of cart-poles whose physics are hidden, in ExoRL's format.

    python -m tools.make_worlds --output DATA
    python -m tools.pack_exorl --root DATA --domain cartpole --algorithm worlds \\
        --task swingup --action-repeat 5 --cache CACHE

Each world has a motor, masses and a length of its own, which no observation shows:
DATA/cartpole/worlds/world_000/meta.json says them. Its episodes go from noise to a
controller that knows the world, by way of one that believes in another world, as if
they were learnt. The same seed makes the same files.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.command_line import Parser, as_program, at_least
from tools.lib.exorl.replay import describe
from tools.lib.exorl.worlds import WorldsRecipe, make


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--output", required=True, type=Path, help="directory of data sets")
    add("--worlds", default=60, type=at_least(1), help="default: %(default)s")
    add(
        "--episodes",
        default=24,
        type=at_least(1),
        help="of each world (default: %(default)s)",
    )
    add("--seed", default=0, type=at_least(0), help="default: %(default)s")
    add(
        "--action-repeat",
        default=5,
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
    recipe = WorldsRecipe(
        chosen.worlds, chosen.episodes, chosen.seed, chosen.action_repeat
    )
    print(describe(make(recipe, chosen.output, chosen.processes)))


if __name__ == "__main__":
    sys.exit(main())
