"""Cells of an evaluation: the prompts of a task at a length, as tokens."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from data.chat_template import ChatTemplate
from data.tokenizer import Tokenizer, begun
from tools.lib.ruler import samples
from tools.lib.ruler.sizing import Draft, Prompt, Room
from tools.lib.ruler.tasks import SEED, TASKS, Sources


@dataclass(frozen=True)
class Encoder:
    """From drafts to tokens: texts to go on from, or what the user of a chat says.

    template: of a chat; None: of a model that goes on with a text.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None

    def __call__(self, draft: Draft) -> np.ndarray:
        """Returns the tokens of a prompt and of its answer's prefix, int32 (n,)."""
        if self.template is None:
            return begun(self.tokenizer, self._text(draft.input + draft.answer_prefix))
        asked = [{"role": "user", "content": draft.input}]
        return self.template.prompt(asked, draft.answer_prefix)

    def count(self, draft: Draft | str) -> int:
        """Counts tokens as RULER does, without those that begin every document."""
        if isinstance(draft, str):
            return len(self._text(draft))
        return len(self(draft)) - (0 if self.template else self.begins)

    @property
    def begins(self) -> int:
        return len(self.tokenizer.begin_of_document)

    def _text(self, text: str) -> np.ndarray:
        return self.tokenizer.encode_all([text])[0]  # faster than `encode`


@dataclass(frozen=True)
class Cell:
    """Prompts of a task at a length, that come one after the other.

    cache_tokens: that the longest of them takes with its answer.
    """

    task: str
    length: int
    prompts: Iterator[Prompt]
    cache_tokens: int


def draw_cells(encoder: Encoder, options: argparse.Namespace) -> list[Cell]:
    """Returns the cells; finds out how much haystack goes into each.

    Raises:
      ValueError, FileNotFoundError: a file is missing or wrong, or a length too short.
    """
    sources = Sources(
        options.haystack, options.english_words, options.squad, options.hotpotqa
    )

    def cell(name: str, length: int) -> Cell:
        task = TASKS[name]
        if task.needs and getattr(sources, task.needs) is None:
            raise ValueError(f"{name} needs a file: give its --{task.needs}")
        room = Room(length, task.tokens, encoder.count)
        try:
            drawn = task.make(SEED, sources).prompts(room, options.samples)
            prompts = chain([next(drawn)], drawn)  # what does not fit fails here
        except ValueError as error:
            raise ValueError(f"{name} at {length} tokens: {error}") from error
        return Cell(name, length, prompts, length + encoder.begins)

    names = options.tasks or [
        name
        for name, task in TASKS.items()
        if not task.needs or getattr(sources, task.needs) is not None
    ]
    return [cell(name, length) for length in options.lengths for name in names]


def read_cells(encoder: Encoder, options: argparse.Namespace) -> list[Cell]:
    """Returns the cells of a folder of prompts: those of the tasks and lengths there.

    Raises:
      ValueError, FileNotFoundError: there are no prompts, or a row is none.
    """

    def cell(name: str, length: int) -> Cell:
        path = samples.prompt_file(options.prompts, length, name)
        for prompt in samples.read_prompts(path):
            if found := [t for t in encoder.tokenizer.special if t in prompt.input]:
                raise ValueError(
                    f"{path} has {found[0]} in a prompt, where it would be text: write "
                    "prompts without a chat's template (base), and give it by --chat"
                )
        tokens = [len(encoder(p.draft)) for p in samples.read_prompts(path)]
        prompts = islice(samples.read_prompts(path), options.samples)
        return Cell(name, length, prompts, max(tokens) + TASKS[name].tokens)

    def is_there(name: str, length: int) -> bool:
        return samples.prompt_file(options.prompts, length, name).is_file()

    cells = [
        cell(name, length)
        for length in options.lengths
        for name in options.tasks or TASKS
        if options.tasks or is_there(name, length)
    ]
    if not cells:
        raise FileNotFoundError(
            f"{options.prompts} has no prompts of --lengths "
            f"{','.join(map(str, options.lengths))}: it must have LENGTH/data/TASK/"
            "validation.jsonl"
        )
    return cells
