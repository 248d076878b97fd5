"""Whether a run's model uses its context: line retrieval by length and depth.

    python -m tools.evaluate line-retrieval --workdir=runs/line_retrieval/160 \\
        --form compact --lengths 128,256,512 --output results/lines
    python -m tools.evaluate line-retrieval --workdir=... --form LRT-NL \\
        --cases published.jsonl --output results/lines

Of every record (see data/line_retrieval.py) one line is asked for. The model writes its
answer, which counts by its last integer; and it is shown the answer, of which every
token must be the likeliest (teacher_forced). --output is a name: rows go to NAME.json
and heat maps to NAME.png. The config is the run's own; its mesh may be another.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from data.line_forms import FORMS, LineForm
from data.line_retrieval import (
    Case,
    base_form,
    case_tokens,
    check_form,
    draw_case,
    read_cases,
    write_cases,
)
from data.tokenizer import Tokenizer
from models.sampling import Sampling
from tasks import base
from tasks.command_line import CONFIG_FLAGS, Parser, as_program, at_least
from tasks.generation import config_to_ask, generator, restored_parameters
from tools.generate import find_tokenizer
from tools.lib.benchmarks.rows import check_output, write_rows
from tools.lib.figures.grids import heat_maps
from tools.lib.figures.style import write_picture
from tools.lib.retrieval.scores import Generated, forced
from tools.lib.retrieval.table import Cell, Scorer, table


def draw_cells(
    form: LineForm,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    depths: int,
    samples: int,
    seed: int,
) -> list[Cell]:
    """Cases for every length and depth, each from a seed of its own.

    depths: how many, evenly from the first line to the last; one: in the middle.

    Raises:
      ValueError: numbers out of range, or a length that cannot be made.
    """
    if depths < 1 or samples < 1 or seed < 0:
        raise ValueError(
            f"{depths=} and {samples=} must be at least 1, and {seed=} at least 0"
        )
    places = np.linspace(0, 1, depths) if depths > 1 else np.array([0.5])

    def cell(tokens: int, number: int, depth: float) -> Cell:
        def case(sample: int) -> Case:
            rng = np.random.default_rng([seed, tokens, number, sample])
            return draw_case(form, tokenizer, rng, tokens=tokens, depth=depth)

        return Cell(tokens, depth, tuple(map(case, range(samples))))

    return [
        cell(tokens, number, depth)
        for tokens in lengths
        for number, depth in enumerate(places.tolist())
    ]


def read_cells(path: Path, form: LineForm, tokenizer: Tokenizer) -> list[Cell]:
    """Cases of a file, by their number of lines and their depth, in tenths.

    A cell's length is the mean of its lines' cases, in tokens.

    Raises:
      FileNotFoundError, ValueError: as `read_cases`, or a case is of another form.
    """
    lines: dict[int, dict[float, list[Case]]] = {}
    for number, case in enumerate(read_cases(path), 1):
        check_form(form, case, f"{path}, case {number}")
        depths = lines.setdefault(case.num_lines, {})
        depths.setdefault(round(case.depth, 1), []).append(case)
    cells = []
    for _, depths in sorted(lines.items()):
        sizes = [
            case_tokens(form, tokenizer, case)
            for cases in depths.values()
            for case in cases
        ]
        length = round(float(np.mean(sizes)))
        cells += [
            Cell(length, depth, tuple(cases)) for depth, cases in sorted(depths.items())
        ]
    return cells


def evaluate(
    config: ml_collections.ConfigDict, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns rows of every run; checks all options before anything is computed.

    Raises:
      ValueError, FileNotFoundError: something in the options or the config is wrong.
    """
    if config.task != "text":
        raise ValueError(f"{config.task=} makes no text: give a config of task 'text'")
    runs = [config.workdir, *options.compare]
    if len(set(runs)) < len(runs):
        raise ValueError(f"runs {', '.join(runs)}: give each of them once")
    form, tokenizer = FORMS[options.form](), find_tokenizer(config, options.tokenizer)
    if options.cases:
        cells = read_cells(options.cases, form, tokenizer)
    else:
        cells = draw_cells(
            form,
            tokenizer,
            options.lengths,
            options.depths,
            options.samples,
            options.seed,
        )
    partition = base.partition(config, jax.devices())
    rows = options.rows or config.data.batch_rows
    cases = [case for cell in cells for case in cell.cases]
    longest = max(case_tokens(form, tokenizer, case) for case in cases)
    programs = generator(
        config,
        partition,
        Sampling(temperature=0, allowed_tokens=tokenizer.vocab_size),
        rows=rows,
        cache_tokens=longest + options.max_tokens,
    )
    # An answer ends its line, whatever token that takes.
    ends = {int(tokenizer.encode(base_form(form, case)[1])[-1]) for case in cases}
    forcing = forced(config, partition, rows=rows, allowed_tokens=tokenizer.vocab_size)
    if options.save_cases:
        write_cases(options.save_cases, cases)
    results = []
    for run in runs:
        with config.unlocked():
            config.workdir = run
        parameters, step = restored_parameters(config, partition)
        generated = Generated(
            programs,
            parameters,
            tokenizer,
            options.max_tokens,
            [*tokenizer.stop_tokens, *ends],
        )
        scorer = Scorer(form, tokenizer, generated, partial(forcing, parameters))
        found = scorer.rows(cells)
        print(f"{run}, step {step}\n{table(found)}", flush=True)
        results += [{"run": run, "step": step} | row for row in found]
    return results


def _options(
    arguments: Sequence[str] | None,
) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        __doc__, epilog=CONFIG_FLAGS, prog="python -m tools.evaluate line-retrieval"
    )
    add = parser.add_argument
    add("--form", choices=FORMS, default="LRT-NL", help="default: %(default)s")
    add(
        "--lengths",
        type=lambda text: [at_least(1)(length) for length in text.split(",")],
        default="1024,2048",
        help="in tokens (default: %(default)s)",
    )
    add("--depths", type=at_least(1), default=5, help="of lines (default: %(default)s)")
    add("--samples", type=at_least(1), default=20, help="of each length and depth (20)")
    add("--seed", type=at_least(0), default=0, help="of the cases")
    add("--cases", type=Path, help="published .jsonl to read instead of drawing cases")
    add("--save-cases", type=Path, help=".jsonl to write them to, a new file")
    add("--max-tokens", type=at_least(1), default=16, help="of an answer (default: 16)")
    add("--rows", type=at_least(1), help="at a time (default: config.data.batch_rows)")
    add(
        "--compare",
        action="append",
        default=[],
        metavar="WORKDIR",
        help="another run of the same model, on the same cases; may be repeated",
    )
    add("--tokenizer", help="bytes, tokenizer.json, .model (default: the corpus's)")
    add("--output", type=Path, help="rows go to NAME.json, heat maps to NAME.png")
    return parser.parse_known_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    options, rest = _options(arguments)
    config = config_to_ask(rest)
    if options.output:
        check_output(options.output.with_suffix(".json"))
    results = evaluate(config, options)
    if options.output:
        write_rows(options.output.with_suffix(".json"), results)
        write_picture(options.output.with_suffix(".png"), heat_maps(results))
