"""What programs that make corpora have in common: arguments, the command to train."""

import argparse
import shlex
import shutil
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_collections

from configs import fine_tune
from data.remote import as_path
from data.rows import ROW_PLANS
from data.text.reading.holdout import Holdout
from data.text.reading.input_files import EVERY_FILE
from data.text.reading.row_files import FORMATS
from data.text.reading.skipped import MOST_REPORTED, BadRow
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile
from data.text.tokens.tokenizer import ByteTokenizer, Tokenizer
from tasks.command_line import Parser, at_least, share


def input_parser(description: str | None, what: str) -> Parser:
    """Returns a parser of inputs, output, tokenizer, and of what becomes of rows.

    what: what is held out, in the plural.
    """
    parser = Parser(description)
    add = parser.add_argument
    formats = f"file or directory; rows: {' '.join(FORMATS)}, and .gz or .zst"
    tokens = '"bytes" (the default without --weights), or a path: tokenizer.json, '
    tokens += "SentencePiece .model, or their directory"
    tuned = "imported weights that the printed command is to fine-tune"
    held = f"share of the {what} to hold out (default: 0.02; of few, up to 0.1)"
    files = "files to read in a directory (default: all that are not hidden)"
    names = "splits of a data set (default: train, and validation or else test)"
    bad = f"rows that are not {what}; skipped ones are reported (stop)"
    cores = "processes (default: as many as there are cores, of 64 MiB or more each)"
    nodes = "Ray cluster to take in place of this machine's cores: auto, or HOST:PORT"
    add("inputs", nargs="+", type=as_path, metavar="INPUT", help=formats)
    add("--output", required=True, type=as_path, help="directory to write, a new one")
    add("--tokenizer", help=tokens)
    add("--weights", type=_weights, default="", metavar="WORKDIR", help=tuned)
    add("--validation-fraction", type=share, help=held)
    add("--pattern", default=EVERY_FILE, help=files)
    add("--splits", default="", metavar="TRAIN,HELD_OUT", help=names)
    add("--bad-rows", choices=("stop", "skip"), default="stop", help=bad)
    makers = parser.add_mutually_exclusive_group()
    makers.add_argument("--workers", type=at_least(1), help=cores)
    makers.add_argument("--ray", dest="workers", metavar="ADDRESS", help=nodes)
    return parser


def chosen_tokenizer(chosen: argparse.Namespace) -> Tokenizer:
    """Opens the tokenizer that the parsed arguments name, or that of bytes.

    Raises:
      ValueError, FileNotFoundError: as `open_tokenizer`, or weights have none named.
    """
    if chosen.weights and chosen.tokenizer is None:
        raise ValueError(
            f"--weights {chosen.weights} do not say what their tokenizer is: give the "
            "directory that they came in (--tokenizer)"
        )
    return open_tokenizer(chosen.tokenizer or ByteTokenizer.name)


def input_options(chosen: argparse.Namespace) -> dict[str, Any]:
    """Returns keywords of `prepare` and `prepare_chats`, by the parsed arguments."""
    return {
        "on_bad_row": _reporter() if chosen.bad_rows == "skip" else None,
        "workers": chosen.workers,
        "validation_fraction": chosen.validation_fraction,
        "pattern": chosen.pattern,
        "splits": tuple(chosen.splits.split(",")) if chosen.splits else (),
    }


def _weights(workdir: str) -> str:
    try:
        fine_tune.get_config(workdir)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return workdir


def _reporter() -> Callable[[BadRow], None]:
    """Returns what prints the first bad rows; all are counted in the summary."""
    numbers = count(1)

    def report(row: BadRow) -> None:
        number = next(numbers)
        if number <= MOST_REPORTED:
            print(f"skipped {row}", file=sys.stderr)
        if number == MOST_REPORTED:
            print("skipped rows are counted from here on", file=sys.stderr)

    return report


def train_command(
    corpus: Path,
    config_file: ModuleType,
    weights: str = "",
    holdout: Holdout | None = None,
    **fields: Any,
) -> str:
    """Returns how to train on a corpus, to be printed: a command that works.

    Batches are made smaller, and validation is left out, where the corpus is too small
    for the config's; a line before the command says so, and what to do.

    Args:
      corpus: directory of the corpus.
      config_file: a module of configs/, for a new model.
      weights: workdir of those to fine-tune instead; "" for none.
      holdout: of the corpus's texts, if another share of them can be held out.
      fields: those of `config.data` that the corpus decides.
    """
    module = fine_tune if weights else config_file
    file = f"{module.__name__.replace('.', '/')}.py"
    config = fine_tune.get_config(weights) if weights else config_file.get_config()
    changes = {"workdir": f"runs/{corpus.resolve().name}", "data.corpus": str(corpus)}
    if config.model.vocab_size and not weights:
        changes["model.vocab_size"] = 0
    for name, value in fields.items():
        if (name, value) not in config.data.items():
            changes[f"data.{name}"] = value
    config.update_from_flattened_dict(changes)
    rows = _rows(config, "train")
    held_out = _rows(config, "validation")
    notes = []
    batch_rows = config.data.batch_rows
    fsdp = config.mesh.fsdp
    of_tokens = f"rows of {config.data.context_tokens} tokens"
    if rows < fsdp:
        return (
            f"too little to train on: {rows} {of_tokens}, and the smallest batch of "
            f"{file} has {fsdp}; prepare more"
        )
    if rows < batch_rows:
        fitting = rows // fsdp * fsdp
        notes.append(
            f"batches of {fitting} rows, not {batch_rows}: there are {rows} "
            f"{of_tokens} to train on"
        )
        changes["data.batch_rows"] = batch_rows = fitting
    if held_out < batch_rows:
        notes.append(
            f"no validation: {held_out} held-out {of_tokens} make no batch of "
            f"{batch_rows}; {_more_held_out(config, batch_rows, holdout)}"
        )
        changes["train.validation_batches"] = 0
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    file = shlex.quote(f"{file}:{weights}" if weights else file)
    program = f"{shlex.quote(interpreter())} train.py --config={file}"
    command = " \\\n    ".join([program, *map(shlex.quote, flags)])
    return "\n".join([*notes, f"train on it:\n  {command}"])


def _more_held_out(
    config: ml_collections.ConfigDict, batch_rows: int, holdout: Holdout | None
) -> str:
    """Returns how to hold out a batch, and still have one to train on."""
    # A row reads one more token than it has: the target of its last one.
    least = batch_rows * config.data.context_tokens + 1
    trained_on = config.mesh.fsdp * config.data.context_tokens + 1
    share = holdout.fraction_of(least, trained_on) if holdout else None
    if share:
        return f"prepare it again with --validation-fraction {share:.2f}"
    return "prepare more"


def _rows(config: ml_collections.ConfigDict, split: str) -> int:
    """Returns how many rows a split of the config's corpus has."""
    plan = ROW_PLANS[config.data.rows]
    try:
        split_file = TokenFile.open(config.data.corpus, split)
        return plan(split_file, config.data.context_tokens).rows
    except ValueError:  # none
        return 0


def interpreter() -> str:
    """Returns what starts this interpreter."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = Path(sys.executable)
    inside = here.is_relative_to(Path.cwd())
    return str(here.relative_to(Path.cwd()) if inside else here)
