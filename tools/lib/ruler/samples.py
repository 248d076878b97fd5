"""Files of prompts and of predictions, with the names and the fields of RULER's own.

    FOLDER/LENGTH/data/TASK/validation.jsonl   index, input, outputs, length, ...
    FOLDER/LENGTH/pred/TASK.jsonl              the same with pred, without the input

So NVIDIA's scripts score our predictions (eval/evaluate.py --data_dir
FOLDER/LENGTH/pred), and models here answer prompts that its scripts wrote.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data.json_text import parse_json, short
from tools.lib.files import replacing
from tools.lib.ruler.sizing import Prompt


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


def read_prompts(path: Path) -> Iterator[Prompt]:
    """Yields the prompts of a file, which RULER's scripts may have written.

    Raises:
      FileNotFoundError: there is no such file, said at once.
      ValueError: a row is not a prompt.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} of prompts")
    return (_prompt(row, where) for row, where in _rows(path))


def _rows(path: Path) -> Iterator[tuple[Any, str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}:{number}"
            try:
                yield parse_json(line), where
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error


def _prompt(row: Any, where: str) -> Prompt:
    found = row if isinstance(row, dict) else {}
    text, prefix = found.get("input"), found.get("answer_prefix", "")
    outputs, length = found.get("outputs"), found.get("length", 0)
    is_listed = isinstance(outputs, list) and bool(outputs)
    if not (
        isinstance(text, str)
        and isinstance(prefix, str)
        and is_listed
        and all(isinstance(output, str) for output in outputs)
        and type(length) is int
    ):
        raise ValueError(
            f"{where} must have an input, outputs, an answer_prefix and a length, got "
            f"{short(row)}"
        )
    return Prompt(text, prefix, tuple(outputs), length)


def depth(prompt: Prompt) -> float:
    """Returns where the first answer stands in a prompt, from 0 to 1."""
    return max(prompt.input.find(prompt.outputs[0]), 0) / max(len(prompt.input), 1)


def append_predictions(
    path: Path, first: int, prompts: Sequence[Prompt], texts: Sequence[str]
) -> None:
    """Adds rows to a file of predictions, from index `first` on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True), first):
            row = {"index": index, "pred": text, "input": ""}
            row |= {"outputs": prompt.outputs, "others": {"depth": depth(prompt)}}
            row |= {"truncation": -1, "length": prompt.length}
            lines.write(json.dumps(row) + "\n")


def read_predictions(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a file of predictions, none where there is no file.

    What a process that was killed left of a row is cut off.
    """
    if not path.is_file():
        return []
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with replacing(path) as part:
            part.write_bytes(content[:whole])
    return [row for row, _ in _rows(path)]
