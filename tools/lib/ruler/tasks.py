"""The thirteen tasks of RULER, and LongEval's lines, by name."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from data.retrieval.lines import FORMS, LineForm, Record, record_of_length
from tools.lib.retrieval.prompts import Prompt, Room
from tools.lib.retrieval.scores import Match, match_all, match_line, match_part
from tools.lib.ruler.documents import Documents
from tools.lib.ruler.frequencies import CommonWords, FrequentWords
from tools.lib.ruler.needles import NEEDLE, NOISE, Needles
from tools.lib.ruler.sources import Sources, hotpotqa, read_questions, squad
from tools.lib.ruler.variables import Variables

DEPTHS = 0.0, 0.25, 0.5, 0.75, 1.0
"""Of the line that is asked for, one after the other."""

SEED = 42


@dataclass(frozen=True)
class Lines:
    """Asks for lines of a record, as LongEval; lengths count the right answer.

    Each prompt is drawn from a seed of its own.
    """

    form: LineForm

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        for number in range(count):
            sample, depth = divmod(number, len(DEPTHS))
            yield self._draw(room, sample, depth)

    def _draw(self, room: Room, sample: int, depth_number: int) -> Prompt:
        form = self.form
        depth = DEPTHS[depth_number]
        tokens = room.length - room.generated

        def ask(record: Record) -> Prompt:
            """Asks for the line that is nearest to the depth."""
            line = round(depth * (len(record.names) - 1))
            name = record.names[line]
            number = record.numbers[line]
            text = record.text + form.question.format(name=name)
            answer = form.answer.format(number=number)
            draft = Prompt(text, form.cue.format(name=name), (answer,), depth=depth)
            return draft._replace(length=room.count(draft) + room.count(answer))

        rng = np.random.default_rng([0, tokens, depth_number, sample])
        return ask(record_of_length(form, tokens, rng, lambda r: ask(r).length))


Recipe = Needles | Variables | CommonWords | FrequentWords | Documents | Lines
"""What draws a task's prompts: of (room, count), `count` prompts as long as goes."""


@dataclass(frozen=True)
class Task:
    """A task.

    tokens: to generate. make: its recipe, from the seed and the files.
    needs: field of `Sources` without which it cannot be made.
    match: share of the answers that a text has, from 0 to 1.
    beyond: tokens to generate that its lengths do not count.
    """

    tokens: int
    make: Callable[[int, Sources], Recipe]
    needs: str = ""
    match: Match = match_all
    beyond: int = 0

    def has_its_file(self, sources: Sources) -> bool:
        """Returns whether the file that it needs is there, if any."""
        return not self.needs or getattr(sources, self.needs) is not None


def _needles(haystack: str = "", **shape: int | str) -> Task:
    """Returns a task of needles in a haystack, by default of essays."""

    def make(seed: int, sources: Sources) -> Recipe:
        return Needles(seed, haystack or sources.essays, **shape)

    return Task(128, make, needs="" if haystack else "haystack")


def _questions(name: str, form: Callable) -> Task:
    """Returns a task of questions, of the file that is called so."""

    def make(seed: int, sources: Sources) -> Recipe:
        questions, documents = read_questions(getattr(sources, name), form)
        return Documents(seed, questions, documents)

    return Task(32, make, name, match_part)


TASKS: dict[str, Task] = {
    "niah_single_1": _needles(NOISE),
    "niah_single_2": _needles(),
    "niah_single_3": _needles(kind="uuids"),
    "niah_multikey_1": _needles(keys=4),
    "niah_multikey_2": _needles(NEEDLE),
    "niah_multikey_3": _needles(NEEDLE, key_kind="uuids", kind="uuids"),
    "niah_multivalue": _needles(values=4),
    "niah_multiquery": _needles(keys=4, asked=4),
    "vt": Task(30, lambda seed, _: Variables(seed)),
    "cwe": Task(120, lambda seed, sources: CommonWords(seed, sources.words[0])),
    "fwe": Task(50, lambda seed, _: FrequentWords(seed)),
    "qa_1": _questions("squad", squad),
    "qa_2": _questions("hotpotqa", hotpotqa),
    # Of RULER's table it is not one.
    "lines": Task(
        16, lambda _, sources: Lines(FORMS[sources.form]), "form", match_line, 16
    ),
}
