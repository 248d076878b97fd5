"""Lines of a record: LongEval's task, beside RULER's thirteen."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.retrieval.lines import LineForm, Record, record_of_length
from tools.lib.retrieval.prompts import Prompt, Room

DEPTHS = 0.0, 0.25, 0.5, 0.75, 1.0
"""Of the line that is asked for, one after the other."""


@dataclass(frozen=True)
class Lines:
    """Draws prompts, each from a seed of its own; lengths count the right answer."""

    form: LineForm

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        for number in range(count):
            yield self._draw(room, *divmod(number, len(DEPTHS)))

    def _draw(self, room: Room, sample: int, place: int) -> Prompt:
        form, depth, tokens = self.form, DEPTHS[place], room.length - room.generated

        def ask(record: Record) -> Prompt:
            """Asks for the line that is nearest to the depth."""
            line = round(depth * (len(record.names) - 1))
            name, number = record.names[line], record.numbers[line]
            text = record.text + form.question.format(name=name)
            answer = form.answer.format(number=number)
            draft = Prompt(text, form.cue.format(name=name), (answer,), depth=depth)
            return draft._replace(length=room.count(draft) + room.count(answer))

        rng = np.random.default_rng([0, tokens, place, sample])
        return ask(record_of_length(form, tokens, rng, lambda r: ask(r).length))
