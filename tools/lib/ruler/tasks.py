"""The thirteen tasks of RULER, and LongEval's lines, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from data.retrieval.lines import FORMS
from tools.lib.retrieval.scores import Match, match_all, match_line, match_part
from tools.lib.ruler.documents import Documents
from tools.lib.ruler.frequencies import CommonWords, FrequentWords
from tools.lib.ruler.lines import Lines
from tools.lib.ruler.needles import NEEDLE, NOISE, Needles
from tools.lib.ruler.sources import Sources, read_hotpotqa, read_squad
from tools.lib.ruler.variables import Variables

SEED = 42

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
        """Whether the file that it needs is there, if any."""
        return not self.needs or getattr(sources, self.needs) is not None


def _essay_task(**shape: int | str) -> Task:
    def make(seed: int, sources: Sources) -> Recipe:
        return Needles(seed, sources.essays, **shape)

    return Task(128, make, needs="haystack")


TASKS: dict[str, Task] = {
    "niah_single_1": Task(128, lambda seed, _: Needles(seed, NOISE)),
    "niah_single_2": _essay_task(),
    "niah_single_3": _essay_task(kind="uuids"),
    "niah_multikey_1": _essay_task(keys=4),
    "niah_multikey_2": Task(128, lambda seed, _: Needles(seed, NEEDLE)),
    "niah_multikey_3": Task(
        128, lambda seed, _: Needles(seed, NEEDLE, "uuids", "uuids")
    ),
    "niah_multivalue": _essay_task(values=4),
    "niah_multiquery": _essay_task(keys=4, asked=4),
    "vt": Task(30, lambda seed, _: Variables(seed)),
    "cwe": Task(120, lambda seed, sources: CommonWords(seed, sources.words[0])),
    "fwe": Task(50, lambda seed, _: FrequentWords(seed)),
    "qa_1": Task(
        32,
        lambda seed, sources: Documents(seed, *read_squad(sources.squad)),
        "squad",
        match_part,
    ),
    "qa_2": Task(
        32,
        lambda seed, sources: Documents(seed, *read_hotpotqa(sources.hotpotqa)),
        "hotpotqa",
        match_part,
    ),
    # Of RULER's table it is not one.
    "lines": Task(
        16, lambda _, sources: Lines(FORMS[sources.form]), "form", match_line, 16
    ),
}
