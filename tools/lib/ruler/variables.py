"""Variables that are assigned to each other: RULER's task "vt".

One chain of five names, spread over the noise in its order; an example with names of
three letters comes before.
"""

import random
import string
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

from tools.lib.retrieval.prompts import Prompt, Room
from tools.lib.ruler.needles import NOISE

HOPS = 4
"""Links of a chain after the first, which is a value's."""
EXAMPLE_VALUE = "12345"
EXAMPLE_TOKENS = 500
"""At most, of the example without its answer."""
LEAST_NOISE = 5

QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following "
    "text.\n\n{context}\nQuestion: Find all variables that are assigned the value "
    "{value} in the text above."
)
ANSWER = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are: "
)


class Variables:
    """Draws prompts. Values are of a stream of their own."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.values = np.random.RandomState(seed)

    def prompts(self, room: Room, count: int) -> Iterator[Prompt]:
        first = replace(room, length=EXAMPLE_TOKENS, generated=0)
        try:
            example = next(first.prompts(self.draw_example, LEAST_NOISE, 1))
        except ValueError:  # in tokens of a byte, where RULER has no example at all
            example = self.draw_example(LEAST_NOISE)
        names = " ".join(example.outputs)
        shown = f"{example.input}{example.answer_prefix} {names}\n"
        least = LEAST_NOISE if room.is_short else 10
        size = room.largest(self.draw, least, taken=room.count(shown))
        draw = partial(self.draw, example=shown)
        return (room.fitted(draw, size, least) for _ in range(count))

    def draw(self, size: int, example: str = "") -> Prompt:
        """Draws a prompt with `size` repeats of the noise, after an example if any."""
        names = self._names(5)
        draft = self._draft(names, str(self.values.randint(10000, 99999)), size)
        if not example:
            return draft
        return draft._replace(input=f"{self._renamed(example)}\n{draft.input}")

    def draw_example(self, size: int) -> Prompt:
        """Draws one with names of three letters, and always the same value."""
        return self._draft(self._names(3), EXAMPLE_VALUE, size)

    def _renamed(self, example: str) -> str:
        """Returns an example with other names and another value."""
        for name in example.split()[-HOPS - 1 :]:
            example = example.replace(name, self._name(len(name)))
        value = str(self.values.randint(10000, 99999))
        return example.replace(EXAMPLE_VALUE, value)

    def _name(self, letters: int) -> str:
        return "".join(self.rng.choices(string.ascii_uppercase, k=letters))

    def _names(self, letters: int) -> list[str]:
        names: list[str] = []
        while len(set(names)) <= HOPS:  # RULER starts a second, broken chain there
            names = [self._name(letters) for _ in range(HOPS + 1)]
        return names

    def _draft(self, names: list[str], value: str, size: int) -> Prompt:
        links = [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
        chain = [f"VAR {names[0]} = {value}", *links]
        lines = [NOISE] * size
        numbers = sorted(self.rng.sample(range(size), len(chain)))
        for inserted, (number, link) in enumerate(zip(numbers, chain, strict=True)):
            lines.insert(number + inserted, link)
        question = QUESTION.format(context="\n".join(lines), value=value)
        return Prompt(
            question, ANSWER.format(count=len(names), value=value), tuple(names)
        )
