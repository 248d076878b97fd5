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
from data.agents.logs import pack_logs
from data.remote import as_path
from data.text.reading.input_files import files_in
from tasks.command_line import Parser, as_program
from tools.lib.prepare import interpreter

CLONE = "cartpole/bc"
"""Config of `exorl_tiny` that needs no environment."""


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("inputs", nargs="+", type=as_path, metavar="INPUT", help=".npz file or folder")
    add("--output", required=True, type=as_path, help="directory to write, a new one")
    chosen = parser.parse_args(arguments)
    files = []
    for path in chosen.inputs:
        files += files_in(path, "*.npz") if path.is_dir() else [path]
    packed = pack_logs(files, chosen.output)
    print(packed.describe())
    longest = int(packed.lengths.max())
    ring = exorl_tiny.get_config(CLONE).mesh.ring
    tokens = 4 * -(-longest // ring) * ring
    print(
        f"train on it:\n  {interpreter()} train.py"
        f" --config=configs/exorl_tiny.py:{CLONE} \\\n"
        f"    --config.workdir={shlex.quote(f'runs/{chosen.output.name}')} \\\n"
        f"    --config.data.trajectories={shlex.quote(str(chosen.output))} \\\n"
        f"    --config.agent.episode_steps={longest} "
        f"--config.data.context_tokens={tokens}"
    )


if __name__ == "__main__":
    sys.exit(main())
