"""The original `ringattention` 0.1.2, in a process with a Python of its own."""

import contextlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tools.lib.benchmarks import original_process
from tools.lib.benchmarks.problems import Operands, Problem
from tools.lib.benchmarks.rows import Sample


class Original:
    """`ringattention` in its process, compiled; see `original_process.py`."""

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        python: Path,
        chunk: int,
        stack: contextlib.ExitStack,
    ):
        """Starts it with these operands, in chunks of `chunk` x `chunk`.

        python: of an environment that has it.
        stack: ends the process.

        Raises, as its methods:
          ValueError: it does not run; with the last line of its errors.
        """
        given = {n: np.asarray(x, np.float32) for n, x in operands._asdict().items()}
        # A document's number is its first token. For one document, none is faster.
        first = problem.visible.k_start
        if first.any():
            given["segments"] = first.reshape(1, -1)
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.savez(self._directory / "problem.npz", **given)
        errors = stack.enter_context((self._directory / "errors.txt").open("w"))
        sizes = self._directory, problem.ring_size, chunk
        command = [*map(str, (python, original_process.__file__, *sizes))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        started = subprocess.Popen(command, text=True, **pipes)
        self._process = stack.enter_context(started)
        stack.callback(started.kill)
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
        return json.loads(line) if line else self._refuse()

    def _refuse(self) -> NoReturn:
        lines = (self._directory / "errors.txt").read_text().strip().splitlines()
        raise ValueError(f"ringattention failed: {(lines or ['it said nothing'])[-1]}")
