"""The thirteen tasks of RULER, by name."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Self

from tools.lib.retrieval.scores import Match, match_all, match_part
from tools.lib.ruler.documents import Documents, read_hotpotqa, read_squad
from tools.lib.ruler.essays import Essays
from tools.lib.ruler.frequencies import CommonWords, FrequentWords
from tools.lib.ruler.needles import NEEDLE, NOISE, Needles
from tools.lib.ruler.variables import Variables
from tools.lib.ruler.word_lists import read_english_words

SEED = 42


Recipe = Needles | Variables | CommonWords | FrequentWords | Documents
"""What draws a task's prompts: of (room, count), `count` prompts as long as goes."""


@dataclass(frozen=True)
class Sources:
    """Files that some tasks need.

    haystack: text of essays. english_words: a longer list than wonderwords has.
    """

    haystack: Path | None = None
    english_words: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self:
        """Takes the files of a program's options."""
        return cls(
            **{field.name: getattr(options, field.name) for field in fields(cls)}
        )

    @cached_property
    def essays(self) -> Essays:
        return Essays.read(self.haystack)

    @cached_property
    def words(self) -> tuple[list[str], str | None]:
        """RULER's longer list of words, none where it is not there; and its label."""
        if self.english_words is None:
            return [], None
        return read_english_words(self.english_words)

    @property
    def labels(self) -> dict[str, str | None]:
        """What is in the files of which there may be another."""
        essays = self.essays.label if self.haystack else None
        return {"haystack": essays, "english_words": self.words[1]}

    def has(self, task: "Task") -> bool:
        """Whether a task's file is there, or it needs none."""
        return not task.needs or getattr(self, task.needs) is not None


@dataclass(frozen=True)
class Task:
    """A task.

    tokens: to generate. make: its recipe, from the seed and the files.
    needs: field of `Sources` without which it cannot be made.
    match: share of the answers that a text has, from 0 to 1.
    """

    tokens: int
    make: Callable[[int, Sources], Recipe]
    needs: str = ""
    match: Match = match_all


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
}
