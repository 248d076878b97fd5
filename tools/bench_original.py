"""Times our rings and the original `ringattention` 0.1.2, in rounds, on the CPU.

    python -m venv ORIGINAL
    ORIGINAL/bin/pip install -r tools/ringattention.txt
    python -m tools.bench_original --python ORIGINAL/bin/python --output rows.json

Forward and backward, causal, float32, on simulated devices; `--mask documents` packs
about five documents into the row, which both mask, and whose tiles we skip too. The
original needs an older JAX than this repository, so it runs in a process with a Python
of its own, and either waits while the other computes. It is timed with each of
--chunks, ours with the default tiles. Simulated devices share the cores: times show the
work of all devices, not what the slowest of them waits for.

Rows are those of `bench_attention.py`, without lse for the original; its
`implementation` is "ringattention", and `versions` says of what.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels.cases import Case, Problem, solve
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks import original_process
from tools.lib.benchmarks.rows import (
    Environment,
    Sample,
    Times,
    add_output,
    make_row,
    report,
    take_rounds,
    take_sample,
)
from tools.lib.benchmarks.variants import (
    Variant,
    compile_variant,
    measure_rates,
    start_devices,
)

LAYOUTS = "contiguous", "striped", "zigzag"
MASKS = "causal", "documents"
GRADED = "out", "dq", "dk", "dv"


class Refused(ValueError):
    """The original does not run; the message is the last line of its errors."""


class Original:
    """`ringattention` in its process, compiled; see `original_process.py`.

    compile_seconds: what that took it.
    versions: of its packages.
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
    python: Path, problem: Problem, devices: int, chunk: int
) -> Iterator[Original]:
    """Starts `ringattention` with this problem, in chunks of `chunk` x `chunk`.

    python: of an environment that has it.

    Raises:
      Refused: it does not run there, or not with such chunks.
    """
    script = Path(original_process.__file__)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        operands = {"q": problem.q, "k": problem.k, "v": problem.v}
        operands["d_out"] = problem.do
        np.savez(
            directory / "problem.npz",
            **{name: x.astype(np.float32) for name, x in operands.items()},
            **segments(problem),
        )
        command = [python, script, directory, devices, chunk, chunk]
        with (
            (directory / "errors.txt").open("w") as errors,
            subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            ) as process,
        ):
            try:
                yield Original(process, directory)
            finally:
                process.kill()


def segments(problem: Problem) -> dict[str, np.ndarray]:
    """Returns a number for the document of each token, if there are several.

    A document's number is the index of its first token, the first that is visible to
    its tokens. Without segments, for one document, the original is faster.
    """
    first_visible = problem.visible.k_start
    return {"segments": first_visible} if first_visible.any() else {}


def measure(
    case: Case, python: Path, chunks: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Times our layouts and the original's chunk sizes: returns a row for each.

    case: the shape and the ring; its layout is that of the original's rows.

    Raises:
      Refused: the original does not run.
    """
    devices = start_devices(case.ring_size)
    mesh = Mesh(np.array(devices), ("ring",))
    environment = Environment.of(devices)
    problem = Problem.of(np.random.default_rng(), case, jnp.float32)
    with contextlib.ExitStack() as stack:
        peers = [
            stack.enter_context(original(python, problem, case.ring_size, chunk))
            for chunk in chunks
        ]
        no_gradient = np.zeros_like(problem.d_lse)
        truth = solve(dataclasses.replace(problem, d_lse=no_gradient), jnp.float64)
        variants = [
            Variant("blockwise", dataclasses.replace(case, layout=layout), jnp.float32)
            for layout in LAYOUTS
        ]
        programs = [compile_variant(variant, problem, mesh) for variant in variants]
        takes = [functools.partial(take_sample, program) for program in programs]
        samples = take_rounds([*takes, *(peer.sample for peer in peers)], repeats)
        # The original has no lse; its error is not in the rows.
        answers = [program.answer() for program in programs]
        answers += [dataclasses.replace(truth, **peer.answer()) for peer in peers]
    ours = {"implementation": "blockwise", "versions": {"jax": jax.__version__}}
    names = [ours | dataclasses.asdict(variant.block_sizes) for variant in variants]
    names += [
        {
            "implementation": "ringattention",
            "versions": peer.versions,
            "block_q": chunk,
            "block_k": chunk,
        }
        for chunk, peer in zip(chunks, peers, strict=True)
    ]
    variants += [Variant("blockwise", case, jnp.float32)] * len(peers)
    rows = []
    for variant, name, ran, taken, answer in zip(
        variants, names, [*programs, *peers], samples, answers, strict=True
    ):
        times = Times.of(ran.compile_seconds, taken)
        rates = measure_rates(variant, times.seconds_median, environment)
        errors = answer.errors(truth)
        graded = {f"error_{name}": errors[name] for name in GRADED}
        rows.append(make_row(environment, variant.case, name, rates, times, graded))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as text, each against the original's best."""
    peers = [row for row in rows if row["implementation"] == "ringattention"]
    best, least = (
        min(row[name] for row in peers)
        for name in ("seconds_median", "cpu_seconds_median")
    )
    titles = "median s", "cpu s", "spread", "error"
    lines = [f"{'':34}" + "".join(f"{title:>10}" for title in titles)]
    for row in rows:
        error = max(row[f"error_{name}"] for name in GRADED)
        tile = f"{row['block_q']} x {row['block_k']}"
        lines.append(
            f"{row['implementation']:15}{row['layout']:11}{tile:8}"
            f"{row['seconds_median']:10.3f}{row['cpu_seconds_median']:10.3f}"
            f"{row['seconds_spread']:10.0%}{error:10.1e}"
            f"   {best / row['seconds_median']:.2f} x as fast as the original's best, "
            f"{least / row['cpu_seconds_median']:.2f} x by cpu s"
        )
    lines.append(
        "cpu s: processor time of all threads, median; spread: (max - min) / median; "
        "error:\nthe largest of out, dq, dk and dv, relative norm against float64"
    )
    return "\n".join(lines)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = functools.partial(
        parser.add_argument, type=at_least(1), help="default: %(default)s"
    )
    parser.add_argument("--python", type=Path, required=True, help="the original's")
    add("--devices", default=8)
    add("--length", default=8192)
    add("--heads", default=4)
    add("--head-dim", default=64)
    parser.add_argument("--mask", choices=MASKS, default=MASKS[0])
    add("--repeats", default=5)
    add("--chunks", default=[128, 256, 512], nargs="+")
    add_output(parser)
    return parser.parse_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    chosen = _arguments(arguments)
    case = Case(
        ring_size=chosen.devices,
        layout="contiguous",
        mask=chosen.mask,
        group=1,
        length=chosen.length,
        head_dim=chosen.head_dim,
        heads=chosen.heads,
        batch=1,
    )
    report(
        chosen.output,
        lambda: measure(case, chosen.python, chosen.chunks, chosen.repeats),
        table,
    )


if __name__ == "__main__":
    sys.exit(main())
