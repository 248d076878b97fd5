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

import itertools
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.text.corpus import prepare
from data.text.holdout import Holdout
from data.text.input_files import files_in
from data.text.tokenizer import ByteTokenizer
from tasks.command_line import Parser, as_program, at_least
from tools.lib.benchmarks.rows import Environment, add_output, make_row, report
from training.sinks import read_scalars

ROOT = Path(__file__).resolve().parents[1]


def prepare_one_document(folder: Path) -> Path:
    """Writes a corpus whose training split is one document; returns its directory."""
    sources = [path.read_bytes() for path in files_in(ROOT, "*.py")]
    long = b"\n".join(sources).decode("utf-8", "replace").replace("\0", "")
    for number in itertools.count():  # which is held out depends on the texts
        split, short = Holdout(), f"not validated: {number}"
        for text in (long, short):
            split.add(text)
        if split.split(long) == "train":
            break
    documents = folder / "training.txt", folder / "validation.txt"
    for document, content in zip(documents, (long, short), strict=True):
        document.write_text(content, encoding="utf-8")
    prepare(documents, folder / "corpus", ByteTokenizer())
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


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as text."""
    titles = "s/step", "tokens/s", "MFU", "MFU paper", "peak GiB"
    lines = [f"{'context':>10}" + "".join(f"{title:>12}" for title in titles)]
    for row in rows:
        line = f"{row['context_tokens']:10}{row['step_seconds']:12.3f}"
        line += f"{row['tokens_per_second']:12.0f}"
        for key in ("mfu", "mfu_paper"):
            line += "-".rjust(12) if row[key] is None else f"{row[key]:12.1%}"
        peak = row["peak_bytes"]
        line += "-".rjust(12) if peak is None else f"{peak / 2**30:12.2f}"
        lines.append(line)
    lines.append(
        "medians over the steps; MFU paper: with attention counted in full, as Ring "
        "Attention does;\npeak: of the fullest device; -: the device does not report it"
    )
    return "\n".join(lines)


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
        table,
    )


if __name__ == "__main__":
    sys.exit(main())
