"""RULER: thirteen tasks at any length, with the published prompts and scores.

    python -m tools.evaluate ruler --workdir=RUN --lengths 4096,8192 --output FOLDER
    python -m tools.evaluate ruler --workdir=RUN --chat llama3 --haystack essays.txt \\
        --squad dev-v2.0.json --hotpotqa hotpot_dev_distractor_v1.json --output FOLDER
    python -m tools.evaluate ruler --workdir=RUN --tasks lines --form compact ...

A length counts a prompt and what is generated after it, in the model's own tokens.
Without --tasks they are those whose files are given: six need none. Prompts go through
the ring and answers are the likeliest tokens. Predictions are written as they come;
the same command goes on where it was stopped. FOLDER gets RULER's own files of them,
scores.json, and depths.txt, scores by depth. The task `lines` is LongEval's line
retrieval, whose lengths count the right answer.

    FOLDER/LENGTH/data/TASK/validation.jsonl   index, input, outputs, length, ...
    FOLDER/LENGTH/pred/TASK.jsonl              the same with pred, without the input

So NVIDIA's scripts score our predictions (eval/evaluate.py --data_dir
FOLDER/LENGTH/pred), and write predictions of another model for the prompts that
--save-prompts FOLDER writes, and nothing else.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np
from tqdm import tqdm

from data.json_text import parse_json
from data.progress import progress
from data.retrieval.lines import FORMS
from data.text.tokens.tokenizer import Tokenizer
from models.decode import NOTHING, Generator
from models.sampling import Sampling
from tasks.command_line import (
    CONFIG_FLAGS,
    Parser,
    as_program,
    at_least,
    did_you_mean,
)
from tasks.generation import generator, restored_parameters
from tasks.text import TextRun
from tools.generate import CHAT, find_template, find_tokenizer, text_config
from tools.lib.benchmarks.rows import Environment, make_row
from tools.lib.files import replacing, write_json
from tools.lib.retrieval.prompts import Encoder, Prompt, Room
from tools.lib.retrieval.scores import depths, summary, table, task_row
from tools.lib.ruler.sources import Sources
from tools.lib.ruler.tasks import SEED, TASKS

LENGTHS = "4096,8192,16384,32768,65536,131072"
RUN = "run.json"
"""Says what predictions of a folder are of."""


def prompt_file(folder: Path, length: int, task: str) -> Path:
    return folder / str(length) / "data" / task / "validation.jsonl"


def prediction_file(folder: Path, length: int, task: str) -> Path:
    return folder / str(length) / "pred" / f"{task}.jsonl"


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    """Writes a file of prompts, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("w", encoding="utf-8") as lines:
        for index, prompt in enumerate(prompts):
            lines.write(json.dumps({"index": index, **prompt._asdict()}) + "\n")


def append_predictions(
    path: Path, first: int, prompts: Sequence[Prompt], texts: Sequence[str]
) -> None:
    """Adds rows to a file of predictions, from index `first` on.

    depth: where the first answer stands in a prompt, from 0 to 1.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True), first):
            begin = max(prompt.input.find(prompt.outputs[0]), 0)
            depth = begin / max(len(prompt.input), 1)
            depth = depth if prompt.depth is None else prompt.depth
            row = {"index": index, "pred": text, "input": ""}
            row |= {"outputs": prompt.outputs, "others": {"depth": depth}}
            row |= {"truncation": -1, "length": prompt.length}
            lines.write(json.dumps(row) + "\n")


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a file of predictions, none where there is no file.

    What a process that was killed left of a row is cut off.

    Raises:
      ValueError: a row is not a prediction.
    """
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with replacing(path) as part:
            part.write_bytes(content[:whole])
    try:
        return [dict(parse_json(line)) for line in content[:whole].splitlines()]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must have predictions: {error}; remove it") from error


@dataclass(frozen=True)
class Cell:
    """Prompts of a task at a length, that come one after the other.

    cache_tokens: that the longest of them takes with its answer.
    """

    task: str
    length: int
    prompts: Iterable[Prompt]
    cache_tokens: int


@dataclass(frozen=True)
class Generated:
    """From prompts, int (n,) each, to the texts that the model goes on with.

    max_tokens: of a text. stop_tokens: after one of them it has ended.
    """

    generator: Generator
    parameters: Any
    tokenizer: Tokenizer
    max_tokens: int
    stop_tokens: Sequence[int]

    def __call__(self, prompts: Sequence[np.ndarray]) -> list[str]:
        """Goes on with as many prompts as the generator has rows, or fewer."""
        rows = [*prompts, *prompts[:1] * (self.generator.rows - len(prompts))]
        steps = self.generator.generate(
            self.parameters, rows, self.max_tokens, 0, self.stop_tokens
        )
        tokens = np.stack(list(steps), axis=1)  # (rows, steps)
        texts = [self.tokenizer.decode(row[row != NOTHING]) for row in tokens]
        return texts[: len(prompts)]


def draw_cells(
    encoder: Encoder, sources: Sources, options: argparse.Namespace
) -> list[Cell]:
    """Returns the cells; finds out how much haystack goes into each.

    Raises:
      ValueError, FileNotFoundError: a file is missing or wrong, or a length too short.
    """

    def cell(name: str, length: int) -> Cell:
        task = TASKS[name]
        if not task.has_its_file(sources):
            raise ValueError(f"{name} needs more than its name: give --{task.needs}")
        room = Room(length + task.beyond, task.tokens, encoder.count)
        try:
            drawn = task.make(SEED, sources).prompts(room, options.samples)
            prompts = chain([next(drawn)], drawn)  # what does not fit fails here
        except ValueError as error:
            raise ValueError(f"{name} at {length} tokens: {error}") from error
        return Cell(name, length, prompts, room.length + encoder.begins)

    names = options.tasks or [n for n in TASKS if TASKS[n].has_its_file(sources)]
    return [cell(name, length) for length in options.lengths for name in names]


def check_folder(folder: Path, about: dict[str, Any]) -> None:
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
        write_json(path, about)
    before = json.loads(path.read_text("utf-8"))
    for key, value in about.items():
        if before.get(key) != value:
            raise ValueError(
                f"{folder} has predictions with {key} {before.get(key)!r}, and these "
                f"would have {value!r}: give another --output"
            )


def answer(
    cell: Cell, generated: Generated, encoder: Encoder, path: Path, bar: tqdm
) -> None:
    """Adds the predictions that a file lacks; bar: counts the tokens of prompts."""
    done = len(read_predictions(path))
    prompts = islice(cell.prompts, done, None)
    bar.set_description(f"{cell.task} {cell.length:,}")
    while batch := list(islice(prompts, generated.generator.rows)):
        texts = generated(list(map(encoder, batch)))
        append_predictions(path, done, batch, texts)
        done += len(batch)
        bar.update(len(batch) * cell.length)


def report_cache(length: int, program: Generator) -> int:
    """Prints and returns the bytes that the cache takes on each device."""
    size = program.empty.lower().compile().memory_analysis().output_size_in_bytes
    print(
        f"{length:,} tokens: the cache of {program.rows} x {program.slots:,} tokens "
        f"takes {size / 2**20:,.1f} MiB on each of {jax.device_count()} devices",
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
    encoder = Encoder(tokenizer, template)
    sources = Sources.of(options)
    cells = draw_cells(encoder, sources, options)
    if options.save_prompts:
        for cell in cells:
            path = prompt_file(options.save_prompts, cell.length, cell.task)
            write_prompts(path, cell.prompts)
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
    given = options.squad, options.hotpotqa, options.form
    about["files"] = [str(file) for file in given if file]
    check_folder(options.output, about)
    stops = [*tokenizer.stop_tokens, *([template.end] if template else [])]
    cache_bytes = {n: report_cache(n, program) for n, program in programs.items()}
    done = 0
    for cell in cells:
        path = prediction_file(options.output, cell.length, cell.task)
        done += len(read_predictions(path)[: options.samples]) * cell.length
    tokens = options.samples * sum(cell.length for cell in cells)
    results = []
    with progress(tokens, " tokens", done=done) as bar:
        for cell in cells:
            path = prediction_file(options.output, cell.length, cell.task)
            wanted = TASKS[cell.task].tokens
            program = programs[cell.length]
            generated = Generated(program, parameters, tokenizer, wanted, stops)
            answer(cell, generated, encoder, path, bar)
    for cell in cells:
        path = prediction_file(options.output, cell.length, cell.task)
        task = TASKS[cell.task]
        predictions = read_predictions(path)[: options.samples]
        row = {"run": config.workdir, "step": step}
        row["cache_bytes"] = cache_bytes[cell.length]
        results.append(row | task_row(cell.task, cell.length, task.match, predictions))
    return about, results


def _names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in TASKS:
            known = ", ".join(TASKS)
            near = did_you_mean(name, TASKS)
            raise argparse.ArgumentTypeError(f"{name} must be one of {known}{near}")
    return text.split(",")


def _numbers(text: str) -> list[int]:
    """Reads numbers with commas between them, into their order."""
    return sorted({at_least(1)(number) for number in text.split(",")})


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    prog = "python -m tools.evaluate ruler"
    parser = Parser(__doc__, epilog=CONFIG_FLAGS, prog=prog)
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--lengths", type=_numbers, default=LENGTHS, help=f"in tokens {default}")
    add("--samples", type=at_least(1), default=500, help=f"at each length {default}")
    add("--tokenizer", help="bytes, tokenizer.json, .model (default: the corpus's)")
    add("--tasks", type=_names, help="with commas (default: all with files)")
    add("--haystack", type=Path, help="text or RULER's json, for five tasks of needles")
    add("--squad", type=Path, help="for qa_1: SQuAD's dev-v2.0.json")
    add("--hotpotqa", type=Path, help="for qa_2: hotpot_dev_distractor_v1.json")
    add("--english-words", type=Path, help="RULER's json, for cwe above 128 Ki or so")
    add("--form", choices=FORMS, help="how records are written, for lines")
    add("--chat", **CHAT, help="of a chat model; a template, or the corpus's, or own")
    add("--rows", type=at_least(1), help="at a time (default: one for each data shard)")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, help="folder of predictions and scores")
    where.add_argument("--save-prompts", type=Path, help="folder to write prompts to")
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
    if by_depth := depths(results):
        (options.output / "depths.txt").write_text(f"{by_depth}\n")
