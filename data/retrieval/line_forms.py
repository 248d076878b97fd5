"""Forms of the task "lines": a record of lines, and a question about one of them.

`LongEval` has the published words (LongChat, 2023), with lines called by number or by
an adjective and a noun. `Compact` and `Letters` are the same task in 5 and in 4
bytes a line, for models of a few layers that are trained from nothing; their figures
cannot be compared with LongEval's.
"""

import string
from functools import cached_property
from pathlib import Path

import numpy as np

WORDS = Path(__file__).parent
"""Directory of the adjectives and the nouns, 300 of each."""

LETTERS = "bcdfghjklmnpqrst"
"""Few, as a model has to learn of each one that it is the same as itself."""


class LineForm:
    """A form of the task; by itself lines are a name and a number.

    header, end: text before and after the record's lines.
    numbers: the least number that a line may say, and the one after the largest.
    names: how many names of lines there are; None: as many as wanted.
    """

    header = ""
    end = "\n"
    numbers = 10, 100
    names: int | None

    def order(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Returns numbers of the first lines' names, int64 (count,), distinct."""
        return rng.permutation(self.names)[:count]

    def name(self, which: int) -> int | str:
        """Returns the name of this number."""
        raise NotImplementedError

    def line(self, name: int | str, number: int) -> str:
        """Returns a line of the record, its end included."""
        return f"{name}{number}\n"

    def question(self, name: int | str) -> str:
        """Returns the end of the published prompt."""
        return ""

    def cue(self, name: int | str) -> str:
        """Returns the beginning of the answer, for models that continue a text."""
        return str(name)

    def answer(self, number: int) -> str:
        """Returns the text that has to follow the cue."""
        return f"{number}\n"


class LongEval(LineForm):
    """LongEval's own words. In the base form the answer is begun: "Line <…>: …"."""

    header = (
        "Below is a record of lines I want you to remember. Each line begins with "
        "'line <line index>' and contains a '<REGISTER_CONTENT>' at the end of the "
        "line as a numerical value. For each line index, memorize its corresponding "
        "<REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the "
        "corresponding <REGISTER_CONTENT> of a certain line index. Now the record "
        "start:\n\n"
    )
    end = "\nNow the record is over."
    numbers = 1, 50_001

    def line(self, name: int | str, number: int) -> str:
        return f"line {name}: REGISTER_CONTENT is <{number}>\n"

    def question(self, name: int | str) -> str:
        asked = f"Tell me what is the <REGISTER_CONTENT> in line {name}?"
        return f" {asked} I need the number."

    def cue(self, name: int | str) -> str:
        return f"Line <{name}>: <REGISTER_CONTENT> is"

    def answer(self, number: int) -> str:
        return f" <{number}>\n"


class NumberedLines(LongEval):
    """LongEval's LRT: lines are called 1, 2, 3, …, in this order."""

    names = None

    def order(self, count: int, rng: np.random.Generator) -> np.ndarray:
        return np.arange(count)

    def name(self, which: int) -> int:
        return which + 1


class NamedLines(LongEval):
    """LongEval's LRT-NL, its usual kind: lines are called as "torpid-kid"."""

    @cached_property
    def _words(self) -> tuple[list[str], list[str]]:
        files = "line_adjectives.txt", "line_nouns.txt"
        adjectives, nouns = ((WORDS / file).read_text().split() for file in files)
        return adjectives, nouns

    @property
    def names(self) -> int:
        adjectives, nouns = self._words
        return len(adjectives) * len(nouns)

    def name(self, which: int) -> str:
        adjectives, nouns = self._words
        return f"{adjectives[which // len(nouns)]}-{nouns[which % len(nouns)]}"


class Compact(LineForm):
    """Lines "qx47", an empty line, and the beginning of a line: "qx".

    Not LongEval's words, and easier: names of two letters and numbers of two digits.
    """

    names = len(LETTERS) ** 2

    def name(self, which: int) -> str:
        return LETTERS[which // len(LETTERS)] + LETTERS[which % len(LETTERS)]


class Letters(LineForm):
    """Lines "q47": names of one letter, of which there are 52.

    A model of two layers finds them by the one token before; two letters take more.
    """

    names = len(string.ascii_letters)

    def name(self, which: int) -> str:
        return string.ascii_letters[which]


FORMS: dict[str, type[LineForm]] = {
    "compact": Compact,
    "letters": Letters,
    "LRT": NumberedLines,
    "LRT-NL": NamedLines,
}
