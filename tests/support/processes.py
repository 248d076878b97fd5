"""Programs of several processes on this machine, as many hosts would run them."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Ended = tuple[int, str, str]
LOGGED = re.compile(
    r"[IWEF]\d{4} [\d:.]+ +\d+ \S+\.(cc|h):\d+\] |\*\*\* Check failure|    @ +0x"
)
"""Begins a line of a C++ library's logger, and of the stack that it ends with."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class Processes:
    """Python processes that run at the same time; a context manager that ends them."""

    def __init__(
        self,
        commands: Sequence[Sequence[object]],
        cwd: Path = ROOT,
        python: str = sys.executable,
        **environment: str,
    ):
        """Starts `python COMMAND` for each of the commands, from a folder."""
        # Each has devices of its own, and none of those that the tests simulate.
        self.running = [
            subprocess.Popen(
                [python, *map(str, command)],
                cwd=cwd,
                env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for command in commands
        ]

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()
            process.communicate()

    def wait_for(self, line: str, which: int = 0) -> None:
        """Returns when a process has said a line that begins so."""
        process = self.running[which]
        for said in process.stdout:
            if said.startswith(line):
                return
        errors = process.stderr.read()[-3000:]
        raise AssertionError(f"{line!r} was never said: {errors}")

    def finish(self, timeout: float = 300) -> list[Ended]:
        """Exit code, and the rest of stdout and stderr, of each."""
        said = [process.communicate(timeout=timeout) for process in self.running]
        codes = [process.returncode for process in self.running]
        return [(code, *texts) for code, texts in zip(codes, said, strict=True)]


def run_program(*command: object, timeout: float = 300, **options: Any) -> Ended:
    """Exit code, stdout and stderr of `python COMMAND`; options: see `Processes`."""
    with Processes([command], **options) as one:
        (result,) = one.finish(timeout)
    return result


def without_logs(errors: str) -> str:
    """Leaves out what C++ libraries log: gRPC may fail while its processes end."""
    lines = errors.splitlines(keepends=True)
    return "".join(line for line in lines if not LOGGED.match(line))
