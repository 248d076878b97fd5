"""Files of prompts and of predictions as RULER has them, and of LongEval's cases.

    FOLDER/LENGTH/data/TASK/validation.jsonl   index, input, outputs, length, ...
    FOLDER/LENGTH/pred/TASK.jsonl              the same with pred, without the input

So NVIDIA's scripts score our predictions (eval/evaluate.py --data_dir
FOLDER/LENGTH/pred), and models here answer prompts that its scripts wrote.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from data.json_text import parse_json, short
from data.retrieval.lines import Case, LineForm
from tools.lib.files import replacing
from tools.lib.retrieval.prompts import Prompt

CASE = {"expected_number": int, "num_lines": int, "correct_line": str, "prompt": str}
CASE |= {"random_idx": list}
"""Types of a case's fields."""


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
      FileNotFoundError: the file is missing, said at once.
      ValueError: a row is not a prompt.
    """
    return _read(path, "prompt", _prompt)


def read_cases(path: Path, form: LineForm) -> list[Case]:
    """Reads the cases of a published file.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: a row is not a case of the form, or the file has none.
    """
    cases = list(_read(path, "case", partial(_case, form)))
    if not cases:
        raise ValueError(f"{path} has no cases")
    return cases


def _read[T](path: Path, name: str, make: Callable[[Any], T]) -> Iterator[T]:
    """Yields what `make` makes of the JSON values of a file's lines."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} of {name}s")

    def rows() -> Iterator[T]:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip():
                        yield make(parse_json(line))
                except ValueError as error:
                    raise ValueError(
                        f"{path}:{number} must be a {name}: {error}; mend or remove "
                        "the row"
                    ) from error

    return rows()


def _prompt(row: Any) -> Prompt:
    match {"answer_prefix": "", "length": 0} | (row if isinstance(row, dict) else {}):
        case {
            "input": str(text),
            "answer_prefix": str(prefix),
            "outputs": [_, *_] as outputs,
            "length": int(length),
        } if all(isinstance(output, str) for output in outputs):
            return Prompt(text, prefix, tuple(outputs), length)
    raise ValueError(
        "it must have an input, outputs, an answer_prefix and a length, got "
        f"{short(row)}"
    )


def _case(form: LineForm, row: Any) -> Case:
    if not isinstance(row, dict):
        raise ValueError(f"it must be an object, got {type(row).__name__}")
    for field, kind in CASE.items():
        if field not in row:
            raise ValueError(f"it has no {field}")
        if type(row[field]) is not kind:  # True is not a number
            raise ValueError(
                f"{field} must be {kind.__name__}, got {short(row[field])}"
            )
    number, lines, line, prompt, asked = (row[field] for field in CASE)
    if [*map(type, asked)] not in ([int, int], [str, int]):
        raise ValueError(f"random_idx must be a name and a place, got {short(asked)}")
    name, place = asked
    if not 0 <= place < lines:
        raise ValueError(
            f"the place must be below num_lines={short(lines)}, got {short(place)}"
        )
    expected = form.line.format(name=name, number=number).strip()
    if line.strip() != expected:
        raise ValueError(
            f"{short(line.strip())} is written otherwise than {short(expected)}: "
            "choose the form that the cases have"
        )
    if line.strip() not in prompt:
        raise ValueError(f"{short(line.strip())} is not in the prompt")
    prompt.encode()  # JSON can spell half a surrogate pair
    return Case(name, number, place, lines, prompt)


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
            row = {"index": index, "pred": text, "input": ""}
            row |= {"outputs": prompt.outputs, "others": {"depth": depth}}
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
    return list(_read(path, "prediction", dict))
