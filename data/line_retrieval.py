"""Line retrieval: a record of lines, and the question what one of them says.

The task "lines" of LongEval (LongChat, 2023): the record can be as long as any context,
what is asked for can be at any depth of it, and there is nothing to guess it from.
Files of cases have the published fields, so published files are read too. How records
are written is a matter of data/line_forms.py.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.json_text import parse_json, short
from data.line_forms import LineForm
from data.tokenizer import Tokenizer, begun

MOST_DIGITS = 4300
"""Limit of Python's conversion of a text to an int."""


@dataclass(frozen=True)
class Case:
    """A record and a question about one line of it, with LongEval's own fields.

    random_idx: what the line is called, and its place in the record, from 0.
    expected_number: what it says.
    num_lines: of the record.
    correct_line: the whole line.
    prompt: record and question.
    """

    random_idx: tuple[int | str, int]
    expected_number: int
    num_lines: int
    correct_line: str
    prompt: str

    @property
    def name(self) -> int | str:
        """Name of the line."""
        return self.random_idx[0]

    @property
    def depth(self) -> float:
        """Place of the line, from 0 for the first to 1 for the last."""
        return self.random_idx[1] / max(self.num_lines - 1, 1)


@dataclass(frozen=True, eq=False)
class Record:
    """Lines, as numbers.

    names: int64 (lines,), which of the form's names each line has.
    numbers: int64 (lines,), what each line says.
    """

    form: LineForm
    names: np.ndarray
    numbers: np.ndarray

    def first(self, lines: int) -> "Record":
        """Returns the record of the first `lines` lines."""
        return Record(self.form, self.names[:lines], self.numbers[:lines])

    @property
    def text(self) -> str:
        form = self.form
        pairs = zip(self.names.tolist(), self.numbers.tolist(), strict=True)
        lines = (form.line(form.name(which), number) for which, number in pairs)
        return "".join([form.header, *lines, form.end])

    def case(self, place: int) -> Case:
        """Returns the record with the question about the line at `place`."""
        name = self.form.name(int(self.names[place]))
        number = int(self.numbers[place])
        return Case(
            random_idx=(name, place),
            expected_number=number,
            num_lines=self.names.size,
            correct_line=self.form.line(name, number),
            prompt=self.text + self.form.question(name),
        )


def draw_record(form: LineForm, lines: int, rng: np.random.Generator) -> Record:
    """Draws a record in which no two lines have one name.

    Raises:
      ValueError: no lines, or more than the form has names.
    """
    if lines < 1 or (form.names is not None and lines > form.names):
        most = "" if form.names is None else f" and at most {form.names}"
        raise ValueError(f"a record of {lines=} must have at least 1{most}")
    return Record(form, form.order(lines, rng), rng.integers(*form.numbers, lines))


def record_of_length(
    form: LineForm,
    tokens: int,
    rng: np.random.Generator,
    length: Callable[[Record], int],
) -> Record:
    """Draws a record with as many lines as fit into `tokens`.

    length: of a record in tokens; more lines must not make it smaller.

    Raises:
      ValueError: not one line fits, or the form has too few names.
    """
    # No line has less than a token.
    most = max(tokens if form.names is None else min(tokens, form.names), 1)
    pool = draw_record(form, most, rng)
    fits, fails = 0, 1
    while fails <= most and length(pool.first(fails)) <= tokens:
        fits, fails = fails, 2 * fails
    if fails > most and length(pool) <= tokens:
        raise ValueError(
            f"{tokens} tokens hold all of the {most} lines that this form has names "
            "for: ask for fewer tokens, or take a form with more names"
        )
    fails = min(fails, most)
    while fits + 1 < fails:
        middle = (fits + fails) // 2
        if length(pool.first(middle)) <= tokens:
            fits = middle
        else:
            fails = middle
    if not fits:
        raise ValueError(
            f"{tokens} tokens are too few for a record of one line and its question, "
            f"which take {length(pool.first(1))}: ask for more"
        )
    return pool.first(fits)


def draw_case(
    form: LineForm,
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    *,
    tokens: int,
    depth: float,
) -> Case:
    """Draws a case of a given length, whose line is at a given depth.

    Args:
      form, tokenizer: how the record is written, and what tokens are.
      rng: decides everything else.
      tokens: of prompt, cue and answer together, at most; one line more would be too
        long.
      depth: of the line, 0 for the first and 1 for the last; the nearest is taken.

    Raises:
      ValueError: a depth out of range, or a length that cannot be made.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"{depth=} must be from 0, the first line, to 1, the last")

    def case(record: Record) -> Case:
        return record.case(round(depth * (record.names.size - 1)))

    def length(record: Record) -> int:
        return case_tokens(form, tokenizer, case(record))

    return case(record_of_length(form, tokens, rng, length))


def case_tokens(form: LineForm, tokenizer: Tokenizer, case: Case) -> int:
    """Counts the tokens of prompt, cue and answer together, and what begins them."""
    prompt, answer = map(tokenizer.encode, base_form(form, case))
    return len(begun(tokenizer, prompt)) + len(answer)


def base_form(form: LineForm, case: Case) -> tuple[str, str]:
    """Returns prompt and answer for a model that continues a text."""
    prompt = case.prompt + form.cue(case.name)
    return prompt, form.answer(case.expected_number)


def last_integer(output: str) -> int | None:
    """Returns the last integer of an output, by the published rule; None if none.

    Of more than `MOST_DIGITS`, which models do write, the first count.
    """
    found = re.findall(r"\d+", output)
    return int(found[-1].lstrip("0")[:MOST_DIGITS] or 0) if found else None


def is_correct(output: str, case: Case) -> bool:
    """Returns whether the last integer of an output is the expected one."""
    return last_integer(output) == case.expected_number


def is_answered(output: str, case: Case) -> bool:
    """Returns the same of what follows the base form's cue, up to the line's end.

    A model that only goes on with a text will not stop there.
    """
    return is_correct(output.strip().partition("\n")[0], case)


def check_form(form: LineForm, case: Case, where: str) -> None:
    """Raises ValueError if a case is written in another form."""
    expected = form.line(case.name, case.expected_number).strip()
    if case.correct_line.strip() != expected:
        raise ValueError(
            f"{where}: {short(case.correct_line.strip())} is written otherwise than "
            f"{short(expected)}: choose the form that the cases have"
        )


def write_cases(path: Path, cases: Iterable[Case]) -> None:
    """Writes one JSON object a line, under a temporary name until all are written.

    Raises:
      FileExistsError: there is such a file, which is left as it is.
    """
    if path.exists():
        raise FileExistsError(f"{path} exists: remove it or choose another name")
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(asdict(case)) + "\n" for case in cases)
    part.replace(path)


def read_cases(path: Path) -> list[Case]:
    """Reads the cases of a file, published or our own.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a row is not a case, with number and reason, or there is none.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path} of cases")
    cases = list(_read(path))
    if not cases:
        raise ValueError(f"{path} has no cases")
    return cases


def _read(path: Path) -> Iterator[Case]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield _parse(parse_json(line))
            except ValueError as error:
                raise ValueError(
                    f"{path}:{number} must be a case: {error}; mend or remove the row"
                ) from error


def _parse(row: Any) -> Case:
    """Makes the case of a parsed row; ValueError says what is wrong."""
    if not isinstance(row, dict):
        raise ValueError(f"it must be an object, got {type(row).__name__}")
    kinds = {"expected_number": int, "num_lines": int}
    kinds |= {"correct_line": str, "prompt": str, "random_idx": list}
    for field, kind in kinds.items():
        if field not in row:
            raise ValueError(f"it has no {field}")
        value = row[field]
        if type(value) is not kind:  # True is not a number
            raise ValueError(f"{field} must be {kind.__name__}, got {short(value)}")
    match row["random_idx"]:
        case [name, place] if type(name) in (int, str) and type(place) is int:
            pass
        case other:
            raise ValueError(
                f"random_idx must be a name and a place, got {short(other)}"
            )
    fields = {field: row[field] for field in kinds}
    case = Case(**fields | {"random_idx": (name, place)})
    _check(case)
    return case


def _check(case: Case) -> None:
    """Raises ValueError if the fields of a case contradict each other."""
    name, place = case.random_idx
    line = case.correct_line.strip()
    if not 0 <= place < case.num_lines:
        given = short(case.num_lines)
        raise ValueError(
            f"the place must be below num_lines={given}, got {short(place)}"
        )
    if last_integer(line) != case.expected_number:
        raise ValueError(f"{short(line)} does not say {short(case.expected_number)}")
    if str(name) not in line:
        raise ValueError(f"{short(line)} is not called {short(name)}")
    if line not in case.prompt:
        raise ValueError(f"{short(line)} is not in the prompt")
    case.prompt.encode()  # JSON can spell half a surrogate pair
