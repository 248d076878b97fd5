"""The original `ringattention` 0.1.2, in a process with a Python of its own."""

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.lib.benchmarks import original_process
from tools.lib.benchmarks.rings import Problem
from tools.lib.benchmarks.rows import Sample


class Refused(ValueError):
    """The original does not run; the message is the last line of its errors."""


class Original:
    """`ringattention` in its process, compiled; see `original_process.py`.

    compile_seconds: of its program. versions: of its packages.
    """

    def __init__(self, process: subprocess.Popen, directory: Path):
        self._process, self._directory = process, directory
        begun = self._read()
        self.compile_seconds: float = begun["compile_seconds"]
        self.versions: dict[str, str] = begun["versions"]

    def sample(self) -> Sample:
        """Runs it once."""
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return Sample(**self._read())

    def answer(self) -> dict[str, np.ndarray]:
        """Ends it; returns out, dq, dk and dv in natural order."""
        self._process.stdin.close()
        if self._process.wait():
            self._refuse()
        with np.load(self._directory / "answer.npz") as answer:
            return dict(answer)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._refuse()
        return json.loads(line)

    def _refuse(self) -> None:
        said = (self._directory / "errors.txt").read_text().strip().splitlines()
        raise Refused(f"ringattention failed: {(said or ['it said nothing'])[-1]}")


@contextlib.contextmanager
def original(
    python: Path, problem: Problem, operands: dict[str, np.ndarray], chunk: int
) -> Iterator[Original]:
    """Starts `ringattention` with these operands, in chunks of `chunk` x `chunk`.

    python: of an environment that has it.

    Raises:
      Refused: it does not run there, or not with such chunks.
    """
    # A document's number is its first token. For one document, none is faster.
    first = problem.visible.k_start
    segments = {"segments": first.reshape(1, -1)} if first.any() else {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        np.savez(directory / "problem.npz", **operands, **segments)
        script = original_process.__file__
        command = [python, script, directory, problem.ring_size, chunk, chunk]
        with (
            (directory / "errors.txt").open("w") as said,
            subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            ) as process,
        ):
            try:
                yield Original(process, directory)
            finally:
                process.kill()
