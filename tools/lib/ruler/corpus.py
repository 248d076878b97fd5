"""A corpus that teaches tasks: prompts of all lengths, with their answers."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.line_corpus import SUPERVISED, Document
from data.tokenizer import Tokenizer
from tools.lib.ruler.needles import NOISE, Needles
from tools.lib.ruler.sizing import DRAWS, Draft
from tools.lib.ruler.tasks import SEED, TASKS, Sources
from tools.lib.ruler.variables import HOPS, Variables, answered

SENTENCES = re.findall(r"[A-Z][^.]+\.", NOISE)
TEACHABLE = "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt"


@dataclass
class TaskDocuments:
    """Draws documents: a prompt of a task drawn from `tasks`, with its answer.

    Haystacks of all sizes up to what `context_tokens` hold come equally often on a
    logarithmic scale; half of the chains of variables come after an example, and half
    of the documents with noise have fewer sentences of it in a line, down to none.
    Chains have from two variables to eight links more.

    tasks: needles without files, or "vt". seed: of the prompts, other than RULER's.
    supervised: "answers", of which the prefix is a part, or "all".
    bare: chains of variables without noise, question and example.

    Raises:
      ValueError: other tasks, or RULER's seed.
    """

    tokenizer: Tokenizer
    tasks: Sequence[str]
    context_tokens: int
    seed: int
    supervised: str = SUPERVISED[0]
    bare: bool = False

    def __post_init__(self):
        for name in self.tasks:
            if name not in TEACHABLE:
                raise ValueError(f"task {name} must be one of {', '.join(TEACHABLE)}")
        if self.bare and {*self.tasks} != {"vt"}:
            raise ValueError(f"only vt can be bare, not {', '.join(self.tasks)}")
        if self.seed == SEED:
            raise ValueError(f"seed {SEED} is that of RULER's prompts: take another")
        recipes = [TASKS[name].make(self.seed, Sources()) for name in self.tasks]
        self._recipes = [r for r in recipes if isinstance(r, Needles | Variables)]

    def draw(self, rng: np.random.Generator) -> Document:
        """Draws the next document.

        Raises:
          ValueError: the smallest haystack does not fit.
        """
        recipe = self._recipes[rng.integers(len(self._recipes))]
        largest = max(self.context_tokens / 8, 1)  # a sentence has more tokens
        for _ in range(DRAWS):
            size = round(math.exp(rng.uniform(0, math.log(largest))))
            draft = self._draft(recipe, size, rng)
            answer = f" {' '.join(draft.outputs)}"
            texts = [draft.input, draft.answer_prefix, answer]
            parts = self.tokenizer.encode_all(texts)
            if sum(part.size for part in parts) < self.context_tokens:
                return self._document(parts)
            largest = max(largest * 0.8, 1)
        raise ValueError(
            f"{self.context_tokens} tokens are too few for documents of "
            f"{', '.join(self.tasks)}: ask for more"
        )

    def _draft(
        self, recipe: Needles | Variables, size: int, rng: np.random.Generator
    ) -> Draft:
        if isinstance(recipe, Needles):
            draft = recipe.draw(size)
        else:
            recipe.hops = int(rng.integers(1, min(size, 2 * HOPS) + 1))
            if self.bare:
                return recipe.draw_bare()
            size, example = max(size, recipe.hops + 1), ""
            if rng.random() < 0.5:
                noise = int(rng.integers(recipe.hops + 1, size + 1))
                example = answered(recipe.draw_example(noise))
            draft = recipe.draw(size, example)
        kept = SENTENCES[: rng.integers(2 * len(SENTENCES))]
        return draft._replace(input=draft.input.replace(NOISE, " ".join(kept)))

    def _document(self, parts: Sequence[np.ndarray]) -> Document:
        end = np.array([self.tokenizer.end_of_document], np.int32)
        lengths = [parts[0].size, parts[1].size + parts[2].size + 1]
        is_supervised = np.repeat([self.supervised == "all", True], lengths)
        return Document(np.concatenate([*parts, end]), is_supervised)
