"""Lines of a record: LongEval's task, beside RULER's thirteen."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data.retrieval.lines import Case, LineForm, draw_case
from tools.lib.retrieval.prompts import Prompt, Room

DEPTHS = 0.0, 0.25, 0.5, 0.75, 1.0
"""Of the line that is asked for, one after the other."""


@dataclass(frozen=True)
class Lines:
    """Draws prompts, each from a seed of its own; lengths count the right answer."""

    form: LineForm

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        tokens = room.length - room.generated

        def length(case: Case) -> int:
            prompt = self._prompt(case)
            return room.count(prompt) + room.count(prompt.outputs[0])

        for number in range(count):
            sample, place = divmod(number, len(DEPTHS))
            rng = np.random.default_rng([0, tokens, place, sample])
            how = {"tokens": tokens, "depth": DEPTHS[place]}
            case = draw_case(self.form, rng, length, **how)
            yield self._prompt(case)._replace(length=length(case), depth=DEPTHS[place])

    def _prompt(self, case: Case) -> Prompt:
        answer = self.form.answer.format(number=case.number)
        return Prompt(case.prompt, self.form.cue.format(name=case.name), (answer,))
