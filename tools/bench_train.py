"""Trains for a few steps at each of several contexts: step time, MFU, peak memory.

    python tools/bench_train.py --config=configs/h200_1b.py --contexts=32768,131072
    python tools/bench_train.py --config=configs/tiny.py --contexts=256 --steps=4

Runs `train.train` itself, each context in a process of its own, with a workdir that is
thrown away and nothing saved. The corpus is one document, Python's standard library end
to end, so that attention reaches over the whole context. Fields of the config can be
changed as for `train.py`: --config.remat=nothing.

The output is a JSON list of rows. Keys: the fields of `Environment` in `bench_rows.py`,
and config, context_tokens, batch_rows, attention, implementation, remat, parameters,
steps (timed ones, after the first, which compiles), step_seconds (median), step_spread
((max - min) / median), tokens_per_second, mfu and mfu_paper (see "MFU" in the README;
null on an unknown chip), peak_bytes (of the fullest device; null where devices do not
say), first_loss and last_loss.
"""

import concurrent.futures
import multiprocessing
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # run as a script, which puts tools/ on the path, not the root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import ml_collections
from absl import app, flags
from ml_collections import config_flags

import assemble
import train
from data.corpus import prepare, standard_library_files
from data.tokenizer import ByteTokenizer
from tools.bench_rows import Environment, check_output, make_row, write_rows
from training.metrics import read_scalars


def prepare_one_document(folder: Path) -> Path:
    """Writes a corpus whose training split is one document, and returns its place."""
    sources = [path.read_bytes() for path in standard_library_files()]
    text = b"\n".join(sources).decode("utf-8", "replace").replace("\0", "")
    documents = folder / "training.txt", folder / "validation.txt"
    for document, content in zip(documents, (text, "not validated"), strict=True):
        document.write_text(content, encoding="utf-8")
    prepare(documents, folder / "corpus", ByteTokenizer())
    return folder / "corpus"


def with_context(
    config: ml_collections.ConfigDict, context: int, steps: int, folder: Path
) -> ml_collections.ConfigDict:
    """The config, to be trained for a few steps with each of them reported."""
    config = config.copy_and_resolve_references().unlock()
    config.workdir = str(folder / f"run_{context}")
    config.data.corpus = str(folder / "corpus")
    config.data.context_tokens = context
    config.optimizer.warmup_steps = min(config.optimizer.warmup_steps, steps - 1)
    config.train.update(steps=steps, log_every_steps=1, validation_batches=0)
    config.checkpoint.save_every_steps = 0
    return config.lock()


def run(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Trains in this process, and returns the row without the config's name."""
    assemble.simulate_devices(config)
    environment = Environment.of(jax.devices())
    train.train(config, lambda line: print(f"  {line}", flush=True))
    curves = read_scalars(f"{config.workdir}/tensorboard")
    seconds = _values(curves, "perf/step_time")
    median = statistics.median(seconds)
    tokens = config.data.context_tokens * config.data.batch_rows
    losses = _values(curves, "train/loss")
    names = "context_tokens", "batch_rows"
    facts = {name: config.data[name] for name in names} | {
        "attention": config.attention,
        "implementation": config.implementation or None,
        "remat": config.remat,
        "steps": len(seconds),
        "step_seconds": median,
        "step_spread": (max(seconds) - min(seconds)) / median,
        "tokens_per_second": tokens / median,
        "mfu": _median_or_none(_values(curves, "perf/mfu")),
        "mfu_paper": _median_or_none(_values(curves, "perf/mfu_paper")),
        "peak_bytes": _peak_bytes(),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    return make_row(environment, facts)


def _values(curves: dict[str, list[tuple[int, float]]], tag: str) -> list[float]:
    return [value for _, value in curves.get(tag, [])]


def _median_or_none(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _peak_bytes() -> int | None:
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if each]
    return max(peaks, default=None)


def measure(
    config: ml_collections.ConfigDict, name: str, contexts: list[int], steps: int
) -> list[dict[str, Any]]:
    """A row for each context, in fresh processes: peaks of memory are per process."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prepare_one_document(Path(folder))
        for context in contexts:
            print(f"{context} tokens", flush=True)
            chosen = with_context(config, context, steps, Path(folder))
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
                row = process.submit(run, chosen).result()
            rows.append({"config": name} | row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
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
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Measures what the flags say."""
    if len(arguments) > 1:
        raise app.UsageError(f"unknown arguments {arguments[1:]}")
    chosen = flags.FLAGS
    try:
        contexts = sorted(map(int, chosen.contexts))
        if chosen.steps < 3 or min(contexts) < 1:
            raise ValueError(f"{chosen.steps=} must be at least 3, {contexts=} 1")
        if chosen.output:
            check_output(Path(chosen.output))
        name = config_flags.get_config_filename(chosen["config"])
        rows = measure(train.CONFIG.value, name, contexts, chosen.steps)
        if chosen.output:
            write_rows(Path(chosen.output), rows)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(table(rows))


if __name__ == "__main__":
    flags.DEFINE_list("contexts", ["32768"], "tokens of a row, a run for each")
    flags.DEFINE_integer("steps", 8, "steps of a run; the first compiles")
    flags.DEFINE_string("output", None, "file of rows to write, a new one")
    flags.mark_flag_as_required("config")
    app.run(main, flags_parser=train.parse_flags)
