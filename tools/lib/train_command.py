"""The command that trains on a corpus that was just prepared."""

import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_collections

from configs import fine_tune
from data.rows import ROW_PLANS
from data.text.token_file import SPLITS, TokenFile


def train_command(
    corpus: Path, config_file: ModuleType, weights: str = "", **fields: Any
) -> str:
    """Returns how to train on a corpus, to be printed: a command that works.

    Batches are made smaller, and validation is left out, where the corpus is too small
    for the config's; a line before the command says so, and what to do.

    Args:
      corpus: directory of the corpus.
      config_file: a module of configs/, for a new model.
      weights: workdir of those to fine-tune instead; "" for none.
      fields: those of `config.data` that the corpus decides.
    """
    module = fine_tune if weights else config_file
    file = f"{module.__name__.replace('.', '/')}.py"
    config = fine_tune.get_config(weights) if weights else config_file.get_config()
    changes = {"workdir": f"runs/{corpus.resolve().name}", "data.corpus": str(corpus)}
    if config.model.vocab_size and not weights:
        changes["model.vocab_size"] = 0
    own = config.data.items()
    changes |= {f"data.{name}": v for name, v in fields.items() if (name, v) not in own}
    config.update_from_flattened_dict(changes)
    rows, held_out = (_rows(config, split) for split in SPLITS)
    notes, batch_rows, fsdp = [], config.data.batch_rows, config.mesh.fsdp
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
        share = 1.2 * batch_rows / (rows + held_out)
        remedy = f"prepare it again with --validation-fraction {share:.2f}"
        notes.append(
            f"no validation: {held_out} held-out {of_tokens} make no batch of "
            f"{batch_rows}; {remedy if share < 0.5 else 'prepare more'}"
        )
        changes["train.validation_batches"] = 0
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    file = shlex.quote(f"{file}:{weights}" if weights else file)
    program = f"{shlex.quote(_python())} train.py --config={file}"
    command = " \\\n    ".join([program, *map(shlex.quote, flags)])
    return "\n".join([*notes, f"train on it:\n  {command}"])


def _rows(config: ml_collections.ConfigDict, split: str) -> int:
    """Returns how many rows a split of the config's corpus has."""
    plan = ROW_PLANS[config.data.rows]
    try:
        split_file = TokenFile.open(config.data.corpus, split)
        return plan(split_file, config.data.context_tokens).rows
    except ValueError:  # none
        return 0


def _python() -> str:
    """Returns what starts this interpreter."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = Path(sys.executable)
    inside = here.is_relative_to(Path.cwd())
    return str(here.relative_to(Path.cwd()) if inside else here)
