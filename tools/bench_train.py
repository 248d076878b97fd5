"""Trains for a few steps at each of several contexts: step time, MFU, peak memory.

    python -m tools.bench_train --config configs/h200_1b.py --contexts 32768 131072
    python -m tools.bench_train --config configs/tiny.py --contexts 256 --steps 4

Runs `train.py` itself, once for each context, with a workdir that is thrown away and
nothing saved. The corpus is one document, this project's Python end to end, so that
attention reaches over the whole context. What this program does not know is passed to
`train.py`: --config.remat=nothing.

The output is a JSON list of rows. Keys: the fields of `Environment` in
`tools/lib/benchmarks/rows.py`, and config, overrides, context_tokens, steps (timed
ones, after the first, which compiles), step_seconds (median), step_spread
((max - min) / median), tokens_per_second,
mfu and mfu_paper (see docs/metrics.md; null on an unknown chip), peak_bytes (of the
fullest device; null where devices do not report it), first_loss and last_loss.
"""

import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.text.input_files import files_in
from data.text.token_file import SPLITS, TokenFileWriter
from data.text.tokenizer import ByteTokenizer
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import Environment, add_output, make_row, report
from training.sinks import read_scalars

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = {
    "tokens": "{context_tokens:,}",
    "s/step": "{step_seconds:.3f}",
    "tokens/s": "{tokens_per_second:,.0f}",
    "MFU": "{mfu:.1%}",
    "MFU paper": "{mfu_paper:.1%}",
    "peak bytes": "{peak_bytes:,}",
}


def prepare_one_document(folder: Path) -> Path:
    """Writes a corpus whose training split is one document; returns its directory."""
    sources = b"\n".join(path.read_bytes() for path in files_in(ROOT, "*.py"))
    tokens = ByteTokenizer().encode(sources.decode("utf-8", "replace"))
    with TokenFileWriter(folder / "corpus", ByteTokenizer()) as writer:
        for split in SPLITS:
            writer.write(split, tokens)
    return folder / "corpus"


def run(
    config: str, overrides: Sequence[str], context: int, steps: int, folder: Path
) -> dict[str, Any]:
    """Trains, and returns the row.

    folder: holds the corpus, and gets the run.

    Raises:
      ValueError: `train.py` failed, and why.
    """
    workdir = folder / f"run_{context}"
    settings = {
        "workdir": workdir,
        "data.corpus": folder / "corpus",
        "data.context_tokens": context,
        "optimizer.warmup_steps": 1,
        "train.steps": steps,
        "train.log_every_steps": 1,
        "train.validation_batches": 0,
        "checkpoint.save_every_steps": 0,
    }
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    command = [sys.executable, "train.py", f"--config={config}", *flags, *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ValueError(f"train.py failed: {' '.join(last)}")
    kind = re.search(r", of (\d+) x (.*)", done.stdout)
    if kind is None:
        raise ValueError(f"train.py did not say what it runs on: {done.stdout[:300]}")
    curves = read_scalars(workdir / "tensorboard")
    times, losses = _values(curves, "perf/step_time"), _values(curves, "train/loss")
    median = statistics.median(times)
    facts = {"config": config, "overrides": list(overrides), "context_tokens": context}
    facts |= {"steps": len(times), "step_seconds": median}
    facts["step_spread"] = (max(times) - min(times)) / median
    for name in ("tokens_per_second", "mfu", "mfu_paper", "peak_bytes"):
        values = _values(curves, f"perf/{name}")
        facts[name] = statistics.median(values) if values else None
    facts |= {"first_loss": losses[0], "last_loss": losses[-1]}
    return make_row(Environment.now(kind[2], int(kind[1])), facts)


def _values(curves: dict[str, list[tuple[int, float]]], tag: str) -> list[float]:
    return [value for _, value in curves.get(tag, [])]


def measure(
    config: str, overrides: Sequence[str], contexts: Sequence[int], steps: int
) -> Iterator[dict[str, Any]]:
    """Yields a row for each context."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_one_document(Path(folder))
        for context in contexts:
            print(f"{context} tokens", flush=True)
            yield run(config, overrides, context, steps, Path(folder))


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    parser = Parser(__doc__)
    parser.add_argument("--config", required=True, help="as train.py's")
    parser.add_argument("--contexts", default=[32768], nargs="+", type=at_least(1))
    steps = {"default": 8, "type": at_least(3), "help": "the first compiles"}
    parser.add_argument("--steps", **steps)
    add_output(parser)
    chosen, overrides = parser.parse_known_args(arguments)
    report(
        chosen.output,
        lambda: measure(chosen.config, overrides, chosen.contexts, chosen.steps),
        COLUMNS,
    )


if __name__ == "__main__":
    sys.exit(main())
