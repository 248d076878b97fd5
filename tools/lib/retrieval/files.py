"""Files of prompts and of predictions as RULER has them.

    FOLDER/LENGTH/data/TASK/validation.jsonl   index, input, outputs, length, ...
    FOLDER/LENGTH/pred/TASK.jsonl              the same with pred, without the input

So NVIDIA's scripts score our predictions (eval/evaluate.py --data_dir
FOLDER/LENGTH/pred), and write predictions of another model for our prompts.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from data.json_text import parse_json
from tools.lib.files import replacing
from tools.lib.retrieval.prompts import Prompt


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
            place = max(prompt.input.find(prompt.outputs[0]), 0)
            depth = place / max(len(prompt.input), 1)
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
