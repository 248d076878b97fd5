"""Packs episodes that bring their own rewards, as a robot's logs, to train agents on.

    python -m tools.pack_logs LOGS/ --output trajectories/arm

Reads .npz files of observations, actions, rewards and, optionally, terminations and
truncations: docs/in_context_rl.md has their shapes. No simulator is needed, and nothing
is computed again. Prints the command that clones the best of them.
"""

import shlex
import sys
from collections.abc import Sequence

from configs import exorl_tiny
from data.agents.logs import log_files, pack_logs
from data.agents.trajectory_file import TrajectoryFile
from data.remote import as_path
from tasks.command_line import Parser, as_program
from tools.lib.prepare import interpreter


def train_command(file: TrajectoryFile) -> str:
    """Returns the command that clones the best tenth of the steps."""
    longest = int(file.lengths.max())
    config = exorl_tiny.get_config("cartpole/bc")
    whole = -(-longest // config.mesh.ring) * config.mesh.ring
    flags = {
        "workdir": f"runs/{file.directory.name}",
        "data.trajectories": file.directory,
        "agent.episode_steps": longest,
        "data.context_tokens": config.agent.step_tokens * whole,
    }
    words = [f"--config.{name}={value}" for name, value in flags.items()]
    words.insert(0, "--config=configs/exorl_tiny.py:cartpole/bc")
    program = f"{shlex.quote(interpreter())} train.py"
    return " \\\n    ".join([program, *map(shlex.quote, words)])


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", type=as_path, metavar="INPUT", help=".npz file or folder")
    add("--output", required=True, type=as_path, help="directory to write, a new one")
    chosen = parser.parse_args(arguments)
    packed = pack_logs(log_files(chosen.inputs), chosen.output)
    print(packed.describe())
    print(f"train on it:\n  {train_command(packed)}")


if __name__ == "__main__":
    sys.exit(main())
