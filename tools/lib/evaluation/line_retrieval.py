"""Whether a run's model uses its context: line retrieval by length and depth.

    python -m tools.evaluate line-retrieval --workdir=runs/line_retrieval/160 \\
        --form compact --lengths 128,256,512 --output results/lines
    python -m tools.evaluate line-retrieval --workdir=... --form LRT-NL \\
        --cases published.jsonl --output results/lines

Of every record (data/retrieval/) one line is asked for. The model writes its
answer, which counts by its last integer; and it is shown the answer, of which every
token must be the likeliest (teacher_forced). --output is a name: rows go to NAME.json
and heat maps to NAME.png. The config is the run's own; its mesh may be another.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import jax
import ml_collections

from data.retrieval.lines import FORMS
from models.sampling import Sampling
from tasks.command_line import as_program, at_least
from tasks.generation import generator, restored_parameters
from tasks.text import TextRun
from tools.generate import find_tokenizer, text_config
from tools.lib.benchmarks.rows import check_output, write_rows
from tools.lib.figures.grids import heat_maps
from tools.lib.figures.style import write_picture
from tools.lib.retrieval.answers import Force, Generated, forced
from tools.lib.retrieval.cells import Cell, line_cells, parser_of
from tools.lib.retrieval.prompts import Encoder
from tools.lib.retrieval.scores import line_table, match_line

MOST_TOKENS = 16
"""Of an answer that does not end by itself."""


def score_cells(
    cells: Sequence[Cell], encoder: Encoder, generated: Generated, force: Force
) -> list[dict[str, Any]]:
    """Returns a row for each cell; those of one length are computed together."""
    rows: list[dict[str, Any]] = []
    for _, group in groupby(cells, key=lambda cell: cell.length):
        mine = [*group]
        asked = [prompt for cell in mine for prompt in cell.prompts]
        prompts = [encoder(prompt) for prompt in asked]
        answers = encoder.tokenizer.encode_all([p.outputs[0] for p in asked])
        texts, right = iter(generated(prompts)), iter(force(prompts, answers))
        for cell in mine:
            own = [*cell.prompts]
            found = [match_line(next(texts), p.outputs) for p in own]
            row = {"length": cell.length, "depth": cell.depth, "samples": len(own)}
            row |= {"lines": cell.lines, "tokens": fmean(p.length for p in own)}
            row |= {"generated": fmean(found)}
            rows.append(row | {"teacher_forced": fmean(next(right) for _ in own)})
    return rows


def evaluate(
    config: ml_collections.ConfigDict, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns rows of every run; checks all options before anything is computed.

    Raises:
      ValueError, FileNotFoundError: something in the options or the config is wrong.
    """
    runs = [config.workdir, *options.compare]
    if len(set(runs)) < len(runs):
        raise ValueError(f"runs {', '.join(runs)}: give each of them once")
    form, tokenizer = FORMS[options.form], find_tokenizer(config, options.tokenizer)
    encoder = Encoder(tokenizer)
    cells = line_cells(form, encoder, options)
    resolved = TextRun.of(config, jax.devices())
    programs = generator(
        resolved,
        Sampling(temperature=0, allowed_tokens=tokenizer.vocab_size),
        rows=config.data.batch_rows,
        cache_tokens=max(cell.cache_tokens for cell in cells) + MOST_TOKENS,
    )
    # An answer ends its line, whatever token that takes.
    answers = [prompt.outputs[0] for cell in cells for prompt in cell.prompts]
    ends = {int(tokens[-1]) for tokens in tokenizer.encode_all(answers)}
    stops = [*tokenizer.stop_tokens, *ends]
    force = forced(resolved, programs, tokenizer.vocab_size)
    results = []
    for run in runs:
        with config.unlocked():
            config.workdir = run
        parameters, step = restored_parameters(resolved)
        generated = Generated(programs, parameters, tokenizer, MOST_TOKENS, stops)
        found = score_cells(cells, encoder, generated, partial(force, parameters))
        print(f"{run}, step {step}\n{line_table(found)}", flush=True)
        results += [{"run": run, "step": step} | row for row in found]
    return results


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = parser_of("line-retrieval", __doc__, lengths="1024,2048", samples=20)
    add = parser.add_argument
    add("--form", choices=FORMS, default="LRT-NL", help="default: %(default)s")
    add("--depths", type=at_least(1), default=5, help="of lines (default: %(default)s)")
    add("--seed", type=at_least(0), default=0, help="of the cases")
    add("--cases", type=Path, help="published .jsonl to read instead of drawing cases")
    compare = "another run of the same model, on the same cases; may be repeated"
    add("--compare", action="append", default=[], metavar="WORKDIR", help=compare)
    add("--output", type=Path, help="rows go to NAME.json, heat maps to NAME.png")
    return parser.parse_known_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    options, rest = _options(arguments)
    config = text_config(rest)
    if options.output:
        check_output(options.output.with_suffix(".json"))
    results = evaluate(config, options)
    if options.output:
        write_rows(options.output.with_suffix(".json"), results)
        write_picture(options.output.with_suffix(".png"), heat_maps(results))
