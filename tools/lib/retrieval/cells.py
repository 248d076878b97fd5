"""Cells of an evaluation: the prompts of a task at a length, and what asks for them."""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from statistics import fmean

import numpy as np

from data.retrieval.lines import Case, LineForm, case_tokens, draw_case
from data.text.tokenizer import Tokenizer
from tasks.command_line import CONFIG_FLAGS, Parser, at_least
from tools.lib.retrieval import files
from tools.lib.retrieval.prompts import Encoder, Prompt, Room
from tools.lib.ruler.sources import Sources
from tools.lib.ruler.tasks import SEED, TASKS


@dataclass(frozen=True)
class Cell:
    """Prompts of a task at a length, that come one after the other.

    cache_tokens: that the longest of them takes with its answer.
    depth, lines: of records: where the line stands, from 0 to 1, and their mean number.
    """

    task: str
    length: int
    prompts: Iterable[Prompt]
    cache_tokens: int
    depth: float = 0.0
    lines: float = 0.0


def numbers(text: str) -> list[int]:
    """Reads numbers with commas between them, into their order."""
    return sorted({at_least(1)(number) for number in text.split(",")})


def parser_of(name: str, description: str, *, lengths: str, samples: int) -> Parser:
    """Returns the parser of `tools.evaluate NAME`, with these defaults."""
    prog = f"python -m tools.evaluate {name}"
    parser = Parser(description, epilog=CONFIG_FLAGS, prog=prog)
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--lengths", type=numbers, default=lengths, help=f"in tokens {default}")
    add("--samples", type=at_least(1), default=samples, help=f"of a cell {default}")
    add("--tokenizer", help="bytes, tokenizer.json, .model (default: the corpus's)")
    return parser


def draw_cells(
    encoder: Encoder, sources: Sources, options: argparse.Namespace
) -> list[Cell]:
    """Returns cells of RULER; finds out how much haystack goes into each.

    Raises:
      ValueError, FileNotFoundError: a file is missing or wrong, or a length too short.
    """

    def cell(name: str, length: int) -> Cell:
        task = TASKS[name]
        if not task.has_its_file(sources):
            raise ValueError(f"{name} needs a file: give its --{task.needs}")
        room = Room(length, task.tokens, encoder.count)
        try:
            drawn = task.make(SEED, sources).prompts(room, options.samples)
            prompts = chain([next(drawn)], drawn)  # what does not fit fails here
        except ValueError as error:
            raise ValueError(f"{name} at {length} tokens: {error}") from error
        return Cell(name, length, prompts, length + encoder.begins)

    names = options.tasks or [
        n for n, task in TASKS.items() if task.has_its_file(sources)
    ]
    return [cell(name, length) for length in options.lengths for name in names]


def read_cells(encoder: Encoder, options: argparse.Namespace) -> list[Cell]:
    """Returns the cells of a folder of prompts, by task and length.

    Raises:
      ValueError, FileNotFoundError: the prompts are missing, or a row is malformed.
    """

    def cell(name: str, length: int) -> Cell:
        path = files.prompt_file(options.prompts, length, name)
        longest = 0
        for prompt in files.read_prompts(path):
            if found := [t for t in encoder.tokenizer.special if t in prompt.input]:
                raise ValueError(
                    f"{path} has {found[0]} in a prompt, where it would be text: write "
                    "prompts without a chat's template (base), and give it by --chat"
                )
            longest = max(longest, len(encoder(prompt)))
        prompts = islice(files.read_prompts(path), options.samples)
        return Cell(name, length, prompts, longest + TASKS[name].tokens)

    cells = [
        cell(name, length)
        for length in options.lengths
        for name in options.tasks or TASKS
        if options.tasks or files.prompt_file(options.prompts, length, name).is_file()
    ]
    if not cells:
        raise FileNotFoundError(
            f"{options.prompts} has no prompts of --lengths "
            f"{','.join(map(str, options.lengths))}: it must have LENGTH/data/TASK/"
            "validation.jsonl"
        )
    return cells


def line_cells(
    form: LineForm, encoder: Encoder, options: argparse.Namespace
) -> list[Cell]:
    """Returns cells of lines: drawn ones, or those of `options.cases`.

    Raises:
      ValueError: a length that cannot be made.
      FileNotFoundError, ValueError: as `read_cases`.
    """
    make, cells = _published if options.cases else _drawn, []
    for length, depth, cases in make(form, encoder.tokenizer, options):
        prompts = [
            Prompt(
                case.prompt,
                form.cue.format(name=case.name),
                (form.answer.format(number=case.number),),
                case_tokens(form, encoder.tokenizer, case),
            )
            for case in cases
        ]
        longest = max(prompt.length for prompt in prompts)
        lines = fmean(case.lines for case in cases)
        cells.append(Cell("lines", length, prompts, longest, depth, lines))
    return cells


Depths = Iterator[tuple[int, float, list[Case]]]
"""Length, depth, and the cases that have them."""


def _drawn(form: LineForm, tokenizer: Tokenizer, options: argparse.Namespace) -> Depths:
    """Draws cases of all lengths and depths, each from a seed of its own.

    options.depths: how many, evenly from the first line to the last; one: in the
      middle.
    """
    one = options.depths == 1
    places = [0.5] if one else np.linspace(0, 1, options.depths).tolist()
    for tokens in options.lengths:
        for number, depth in enumerate(places):
            seeds = ([options.seed, tokens, number, n] for n in range(options.samples))
            how = {"tokens": tokens, "depth": depth}
            rngs = map(np.random.default_rng, seeds)
            yield tokens, depth, [draw_case(form, tokenizer, r, **how) for r in rngs]


def _published(
    form: LineForm, tokenizer: Tokenizer, options: argparse.Namespace
) -> Depths:
    """Reads published cases, by their lines and their depth, in tenths.

    A length is the mean of its lines' cases, in tokens.
    """
    lines: dict[int, dict[float, list[Case]]] = {}
    for case in files.read_cases(options.cases, form):
        depths = lines.setdefault(case.lines, {})
        depths.setdefault(round(case.depth, 1), []).append(case)
    for _, depths in sorted(lines.items()):
        mine = chain.from_iterable(depths.values())
        length = round(fmean(case_tokens(form, tokenizer, c) for c in mine))
        yield from ((length, depth, cases) for depth, cases in sorted(depths.items()))
