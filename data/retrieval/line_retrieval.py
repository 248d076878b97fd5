"""Line retrieval: a record of lines, and the question what one of them says.

The task "lines" of LongEval (LongChat, 2023): the record can be as long as any context,
what is asked for can be at any depth of it, and there is nothing to guess it from.
How records are written is a matter of data/retrieval/line_forms.py.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.retrieval.line_forms import LineForm
from data.text.tokenizer import Tokenizer, begun

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
