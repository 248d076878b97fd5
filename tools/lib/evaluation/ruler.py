"""RULER: thirteen tasks at any length, with the published prompts and scores.

    python -m tools.evaluate ruler --workdir=RUN --lengths 4096,8192 --output FOLDER
    python -m tools.evaluate ruler --workdir=RUN --chat llama3 --haystack essays.txt \\
        --squad dev-v2.0.json --hotpotqa hotpot_dev_distractor_v1.json --output FOLDER

A length counts a prompt and what is generated after it, in the model's own tokens.
Without --tasks they are those whose files are given: six need none. Prompts go through
the ring and answers are the likeliest tokens. Predictions are written as they come;
the same command goes on where it was stopped. FOLDER gets RULER's own files of them
(tools/lib/retrieval/files.py), scores.json, and heat maps of the needles.

--save-prompts FOLDER only writes the prompts; --prompts FOLDER reads them, or those of
NVIDIA's scripts.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import jax
import ml_collections
from tqdm import tqdm

from models.decode import Generator
from models.sampling import Sampling
from tasks.command_line import as_program, at_least
from tasks.generation import generator, restored_parameters
from tasks.text import TextRun
from tools.generate import CHAT, find_template, find_tokenizer, text_config
from tools.lib.benchmarks.rows import Environment, make_row
from tools.lib.files import write_json
from tools.lib.retrieval import files
from tools.lib.retrieval.answers import Generated
from tools.lib.retrieval.cells import Cell, draw_cells, parser_of, read_cells
from tools.lib.retrieval.prompts import Encoder
from tools.lib.retrieval.scores import heat_rows, summary, table, task_row
from tools.lib.ruler.sources import Sources
from tools.lib.ruler.tasks import SEED, TASKS

LENGTHS = "4096,8192,16384,32768,65536,131072"
RUN = "run.json"
"""Says what predictions of a folder are of."""


def check_folder(folder: Path, found: dict[str, Any]) -> None:
    """Writes what the folder's predictions are of, or compares it.

    Raises:
      ValueError: they are of something else.
    """
    path = folder / RUN
    if not path.is_file():
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty, and has no {RUN}: give another --output"
            )
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    before = json.loads(path.read_text("utf-8"))
    for key, value in found.items():
        if before.get(key) != value:
            raise ValueError(
                f"{folder} has predictions with {key} {before.get(key)!r}, and these "
                f"would have {value!r}: give another --output"
            )


def answer(cell: Cell, generated: Generated, encoder: Encoder, path: Path) -> None:
    """Adds the predictions that a file lacks."""
    done = len(files.read_predictions(path))
    prompts = islice(cell.prompts, done, None)
    # Silent where standard error is not a terminal.
    with tqdm(
        desc=f"{cell.task} {cell.length:,}", initial=done, unit=" samples", disable=None
    ) as shown:
        while some := list(islice(prompts, generated.generator.rows)):
            texts = generated([encoder(prompt) for prompt in some])
            files.append_predictions(path, done, some, texts)
            done += len(some)
            shown.update(len(some))


def report_cache(length: int, drawn: Generator) -> int:
    """Prints and returns the bytes that the cache takes on each device."""
    size = drawn.empty.lower().compile().memory_analysis().output_size_in_bytes
    print(
        f"{length:,} tokens: the cache of {drawn.rows} x {drawn.slots:,} tokens takes "
        f"{size / 2**20:,.1f} MiB on each of {jax.device_count()} devices",
        flush=True,
    )
    return size


def evaluate(
    config: ml_collections.ConfigDict, options: argparse.Namespace
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns what is evaluated, and a row for each task and length.

    Checks all options before it computes; only writes prompts where that is asked for.

    Raises:
      ValueError, FileNotFoundError: something in the options or the config is wrong.
    """
    tokenizer = find_tokenizer(config, options.tokenizer)
    template = find_template(config, options.chat, tokenizer)
    encoder, sources = Encoder(tokenizer, template), Sources.of(options)
    if options.prompts:
        cells = read_cells(encoder, options)
    else:
        cells = draw_cells(encoder, sources, options)
    if options.save_prompts:
        for cell in cells:
            path = files.prompt_file(options.save_prompts, cell.length, cell.task)
            files.write_prompts(path, cell.prompts)
            print(path)
        return {}, []
    run = TextRun.of(config, jax.devices())
    rows = options.rows or run.partition.shards("batch")
    sampling = Sampling(temperature=0, allowed_tokens=tokenizer.vocab_size)
    programs = {}
    for length, group in groupby(cells, key=lambda cell: cell.length):
        tokens = max(cell.cache_tokens for cell in group)
        sizes = {"rows": rows, "cache_tokens": tokens}
        programs[length] = generator(run, sampling, **sizes)
    parameters, step = restored_parameters(run)
    about = {"run": config.workdir, "seed": SEED, "chat": options.chat}
    about |= {"tokenizer": options.tokenizer, **sources.labels, "step": step}
    given = options.prompts, options.squad, options.hotpotqa
    about["files"] = [str(file) for file in given if file]
    check_folder(options.output, about)
    stops = [*tokenizer.stop_tokens, *([template.end] if template else [])]
    cache_bytes = {n: report_cache(n, drawn) for n, drawn in programs.items()}
    results = []
    for cell in cells:
        path = files.prediction_file(options.output, cell.length, cell.task)
        task, drawn = TASKS[cell.task], programs[cell.length]
        generated = Generated(drawn, parameters, tokenizer, task.tokens, stops)
        answer(cell, generated, encoder, path)
        predictions = files.read_predictions(path)[: options.samples]
        row = {"run": config.workdir, "step": step}
        row["cache_bytes"] = cache_bytes[cell.length]
        results.append(row | task_row(cell.task, cell.length, task.match, predictions))
    return about, results


def _names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in TASKS:
            known = ", ".join(TASKS)
            raise argparse.ArgumentTypeError(f"{name} must be one of {known}")
    return text.split(",")


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of("ruler", __doc__, lengths=LENGTHS, samples=500)
    add = parser.add_argument
    add("--tasks", type=_names, help="of the thirteen (default: all with files)")
    add("--haystack", type=Path, help="text or RULER's json, for five tasks of needles")
    add("--squad", type=Path, help="for qa_1: SQuAD's dev-v2.0.json")
    add("--hotpotqa", type=Path, help="for qa_2: hotpot_dev_distractor_v1.json")
    add("--english-words", type=Path, help="RULER's json, for cwe above 128 Ki or so")
    add("--chat", **CHAT, help="of a chat model; a template, or the corpus's, or own")
    add("--rows", type=at_least(1), help="at a time (default: one for each data shard)")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, help="folder of predictions and scores")
    where.add_argument("--save-prompts", type=Path, help="folder to write prompts to")
    add("--prompts", type=Path, help="folder to read prompts from")
    return parser.parse_known_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    options, rest = _options(arguments)
    about, results = evaluate(text_config(rest), options)
    if options.save_prompts:
        return
    print(table(results))
    for label in filter(None, (about["haystack"], about["english_words"])):
        print(label)
    environment = Environment.of(jax.devices())
    rows = [make_row(row, environment) for row in results]
    scores = {**about, **summary(results), "rows": rows}
    write_json(options.output / "scores.json", scores)
    if found := heat_rows(results):
        from tools.lib.figures.grids import heat_maps
        from tools.lib.figures.style import write_picture

        title = "Needles that are found, in %"
        picture = heat_maps(found, title=title, depth="depth")
        write_picture(options.output / "needles.png", picture)
