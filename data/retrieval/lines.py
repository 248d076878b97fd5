"""Line retrieval: a record of lines, and the question what one of them says.

The task "lines" of LongEval (LongChat, 2023): the record can be as long as any context,
what is asked for can be at any depth of it, and there is nothing to guess it from.
"""

import re
import string
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
"""Has the adjectives and the nouns, 300 of each."""
LETTERS = "bcdfghjklmnpqrst"
"""Few, as a model has to learn of each one that it is the same as itself."""
MOST_DIGITS = 4300
"""Limit of Python's conversion of a text to an int."""


@dataclass(frozen=True, eq=False)
class LineForm:
    """A form of the task: its texts, with the {name} and the {number} of a line.

    names: of lines; None: 1, 2, 3, …, in this order.
    line: of the record, its end included.
    question: the end of the published prompt.
    cue: the beginning of the answer, for models that continue a text.
    answer: what has to follow the cue.
    header, end: text before and after the record's lines.
    numbers: the least number that a line may say, and the one after the largest.
    """

    names: Sequence[str] | None
    line: str = "{name}{number}\n"
    question: str = ""
    cue: str = "{name}"
    answer: str = "{number}\n"
    header: str = ""
    end: str = "\n"
    numbers: tuple[int, int] = (10, 100)

    def draw_names(self, count: int, rng: np.random.Generator) -> list[int | str]:
        """Draws distinct names of the first lines."""
        if self.names is None:
            return list(range(1, count + 1))
        return [self.names[i] for i in rng.permutation(len(self.names))[:count]]


LONGEVAL = {
    "line": "line {name}: REGISTER_CONTENT is <{number}>\n",
    "question": " Tell me what is the <REGISTER_CONTENT> in line {name}? I need the "
    "number.",
    "cue": "Line <{name}>: <REGISTER_CONTENT> is",
    "answer": " <{number}>\n",
    "header": "Below is a record of lines I want you to remember. Each line begins "
    "with 'line <line index>' and contains a '<REGISTER_CONTENT>' at the end of the "
    "line as a numerical value. For each line index, memorize its corresponding "
    "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the "
    "corresponding <REGISTER_CONTENT> of a certain line index. Now the record "
    "start:\n\n",
    "end": "\nNow the record is over.",
    "numbers": (1, 50_001),
}
"""The published words. In the base form the answer is begun: "Line <…>: …"."""


def _read_words() -> list[str]:
    adjectives = (FOLDER / "line_adjectives.txt").read_text().split()
    nouns = (FOLDER / "line_nouns.txt").read_text().split()
    return [*map("-".join, product(adjectives, nouns))]


FORMS = {
    # Lines "qx47" and "q47": the same task for models of a few layers that are trained
    # from nothing. One of two layers finds a letter by the one token before.
    "compact": LineForm([*map("".join, product(LETTERS, repeat=2))]),
    "letters": LineForm(string.ascii_letters),
    "LRT": LineForm(None, **LONGEVAL),
    "LRT-NL": LineForm(_read_words(), **LONGEVAL),  # its usual kind: "torpid-kid"
}


@dataclass(frozen=True, eq=False)
class Record:
    """Lines: what each is called, and int64 (lines,), what each says."""

    form: LineForm
    names: Sequence[int | str]
    numbers: np.ndarray

    def first(self, lines: int) -> "Record":
        """Returns the record of the first `lines` lines."""
        return Record(self.form, self.names[:lines], self.numbers[:lines])

    @property
    def text(self) -> str:
        pairs = zip(self.names, self.numbers.tolist(), strict=True)
        lines = (self.form.line.format(name=name, number=n) for name, n in pairs)
        return "".join([self.form.header, *lines, self.form.end])


def draw_record(form: LineForm, lines: int, rng: np.random.Generator) -> Record:
    """Draws a record in which no two lines have one name."""
    names = form.draw_names(lines, rng)
    least, end = form.numbers
    return Record(form, names, rng.integers(least, end, lines))


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
    most = max(tokens if form.names is None else min(tokens, len(form.names)), 1)
    pool = draw_record(form, most, rng)
    fits = 0
    fails = 1
    while fails <= most and length(pool.first(fails)) <= tokens:
        fits = fails
        fails *= 2
    if fails > most and length(pool) <= tokens:
        raise ValueError(
            f"{tokens} tokens hold all of the {most} lines that this form has names "
            "for: ask for fewer tokens, or take a form with more names"
        )
    between = range(fits + 1, fails)
    fits += bisect_right(between, tokens, key=lambda lines: length(pool.first(lines)))
    if not fits:
        raise ValueError(
            f"{tokens} tokens are too few for a record of one line and its question, "
            f"which take {length(pool.first(1))}: ask for more"
        )
    return pool.first(fits)


def last_integer(output: str) -> int | None:
    """Returns the last integer of an output, by the published rule; None if none.

    Of more than `MOST_DIGITS`, which models do write, the first count.
    """
    numbers = re.findall(r"\d+", output)
    return int(numbers[-1].lstrip("0")[:MOST_DIGITS] or 0) if numbers else None
