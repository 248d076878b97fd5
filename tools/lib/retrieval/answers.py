"""Answers of a model: the text that it writes, and whether it has an answer right.

`Generated` writes texts. `forced` shows the model an answer and asks whether each token
of it is the likeliest: one forward through the ring and no cache. Where the answer is
the likeliest text, token by token, both agree.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data.text.tokenizer import Tokenizer
from kernels import masks
from models.cache import EMPTY
from models.decode import NOTHING, Generator
from tasks.text import TextRun
from training.mesh import StationaryPartition

NO_PLACE = -2
"""In the place of the index of a token that is not there, not even as an empty slot."""

Force = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], list[bool]]
"""From prompts and answers, int (n,) each, to whether each answer is the likeliest."""


@dataclass(frozen=True)
class Generated:
    """From prompts, int (n,) each, to the texts that the model goes on with.

    max_tokens: of a text. stop_tokens: after one of them it has ended.
    """

    generator: Generator
    parameters: Any
    tokenizer: Tokenizer
    max_tokens: int
    stop_tokens: Sequence[int]

    def __call__(self, prompts: Sequence[np.ndarray]) -> list[str]:
        texts = []
        for some in in_rows(prompts, self.generator.rows):
            drawn = self.generator.generate(
                self.parameters, some, self.max_tokens, 0, self.stop_tokens
            )
            tokens = np.stack(list(drawn), axis=1)
            texts += [self.tokenizer.decode(row[row != NOTHING]) for row in tokens]
        return texts[: len(prompts)]


def in_rows(items: Sequence[Any], rows: int) -> list[list[Any]]:
    """Returns batches of one size; the last is filled up with its own first item."""
    batches = [list(items[i : i + rows]) for i in range(0, len(items), rows)]
    return [batch + batch[:1] * (rows - len(batch)) for batch in batches]


def forced(
    run: TextRun, generator: Generator, allowed_tokens: int
) -> Callable[..., list[bool]]:
    """Returns (parameters, prompts, answers) -> whether each is right (see `Force`).

    generator: of the run's model; its rows and its lengths are taken.
    allowed_tokens: ids from here on are never chosen.
    """
    sequences, ring, mask = run.model.structure, run.attention, run.mask
    few_tokens = run.on(StationaryPartition(run.partition.mesh)).model.structure

    @jax.jit
    def is_right(
        parameters: Any,
        tokens: jax.Array,
        index: jax.Array,
        places: jax.Array,
        targets: jax.Array,
    ) -> jax.Array:
        """Takes tokens and index (B, T), in layout order, and an answer's (B, n)."""
        lengths = (index != EMPTY).sum(axis=1, dtype=jnp.int32)
        # The first token of an answer is predicted where its prompt ends.
        prompts = jnp.where(places == NO_PLACE, EMPTY - 1, places).min(axis=1) + 1
        visible = mask.of_prompts(prompts[:, None]) & masks.padding(lengths[:, None])
        hidden = nnx.merge(sequences, parameters)(
            tokens,
            jnp.where(index == EMPTY, 0, index),
            functools.partial(ring, visible=visible),
        )
        # A product with zeros and ones, as a gather would bring whole rows together.
        is_chosen = (index[:, None] == places[..., None]).astype(hidden.dtype)
        chosen = jnp.einsum("bmt,bte->bme", is_chosen, hidden, precision="highest")
        scores = nnx.merge(few_tokens, parameters).logits(chosen)
        likeliest = scores[..., :allowed_tokens].argmax(axis=-1)
        return ((likeliest == targets) | (places == NO_PLACE)).all(axis=1)

    def force(
        parameters: Any, prompts: Sequence[np.ndarray], answers: Sequence[np.ndarray]
    ) -> list[bool]:
        pairs = list(zip(prompts, answers, strict=True))
        shape = generator.rows, max(map(len, answers))
        right: list[bool] = []
        for some in in_rows(pairs, generator.rows):
            texts = generator.padded([np.concatenate(pair) for pair in some])
            places = np.full(shape, NO_PLACE, np.int32)
            targets = np.zeros(shape, np.int32)
            for row, (prompt, answer) in enumerate(some):
                places[row, : answer.size] = np.arange(answer.size) + prompt.size - 1
                targets[row, : answer.size] = answer
            given = *map(generator.place, texts), places, targets
            right += np.asarray(is_right(parameters, *given)).tolist()
        return right[: len(pairs)]

    return force
