"""Whether a model finds the lines: what it generates, and what it would have chosen.

`Generated` lets it write and reads the number out of the text. `Forced` shows it the
answer and asks whether each token of it was the likeliest: one forward through the ring
and no cache. Where the answer is the likeliest text, token by token, both agree.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from data.tokenizer import Tokenizer
from kernels import masks
from kernels.layouts import divisor, order
from models import decode
from models.cache import EMPTY
from models.decode import NOTHING, Generator
from tasks import base, text
from tasks.mask import document_mask
from training.mesh import Partition, StationaryPartition

NO_PLACE = -2
"""In the place of a token's index: there is no such token, not even an empty slot."""


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


@dataclass(frozen=True)
class Forced:
    """From prompts and answers, int (n,) each, to whether the model has them right.

    program: what `forced_program` compiles. rows: B.
    order: from T to the indices in layout order. padded: from tokens to T.
    place: from an array of the host, (B, T), to the mesh.
    """

    program: Callable[..., jax.Array]
    rows: int
    order: Callable[[int], np.ndarray]
    padded: Callable[[int], int]
    place: Callable[[np.ndarray], jax.Array]

    def __call__(
        self,
        parameters: Any,
        prompts: Sequence[np.ndarray],
        answers: Sequence[np.ndarray],
    ) -> list[bool]:
        """Raises ValueError if an answer has no tokens."""
        if min(map(len, answers)) < 1:
            raise ValueError("an answer has no tokens: give each at least one")
        longest = max(map(len, prompts)) + max(map(len, answers))
        length, most = self.padded(longest), max(map(len, answers))
        right: list[bool] = []
        pairs = list(zip(prompts, answers, strict=True))
        for some in in_rows(pairs, self.rows):
            arrays = _rows(some, length, most, self.order(length))
            tokens, index = map(self.place, arrays[:2])
            found = self.program(parameters, tokens, index, *arrays[2:])
            right += np.asarray(found).tolist()
        return right[: len(pairs)]


def _rows(
    pairs: Sequence[tuple[np.ndarray, np.ndarray]],
    length: int,
    most: int,
    slots: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Returns tokens, index (B, T) in layout order; places, targets (B, most)."""
    tokens = np.zeros((len(pairs), length), np.int32)
    index = np.full((len(pairs), length), EMPTY, np.int32)
    places = np.full((len(pairs), most), NO_PLACE, np.int32)
    targets = np.zeros((len(pairs), most), np.int32)
    for row, (prompt, answer) in enumerate(pairs):
        text = np.concatenate([prompt, answer])
        tokens[row, : text.size], index[row, : text.size] = text, np.arange(text.size)
        places[row, : answer.size] = np.arange(answer.size) + prompt.size - 1
        targets[row, : answer.size] = answer
    return tokens[:, slots], index[:, slots], places, targets


def in_rows(items: Sequence[Any], rows: int) -> list[list[Any]]:
    """Yields batches of one size; the last is filled up with its own first item."""
    batches = [list(items[i : i + rows]) for i in range(0, len(items), rows)]
    return [batch + batch[:1] * (rows - len(batch)) for batch in batches]


def _power_of_two(divisor: int, length: int) -> int:
    """Times the divisor, so that texts of like lengths share a program."""
    while divisor < length:
        divisor *= 2
    return divisor


def forced(
    config: ml_collections.ConfigDict,
    partition: Partition,
    *,
    rows: int,
    allowed_tokens: int,
) -> Forced:
    """Returns the scorer of the config's model on the mesh, from logits.

    rows: cases at a time. allowed_tokens: ids from here on are never chosen.

    Raises:
      ValueError: rows or sizes that do not divide over the mesh.
    """
    layout, ring = base.attention_system(config).layout, partition.ring_size

    def place(x: np.ndarray) -> jax.Array:
        sharding = partition.sharding(("batch", "sequence"), x.shape)
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    return Forced(
        program=jax.jit(_program(config, partition, allowed_tokens)),
        rows=rows,
        order=functools.partial(order, layout, ring),
        padded=functools.partial(
            _power_of_two, divisor(layout, ring, partition.slices)
        ),
        place=place,
    )


def _program(
    config: ml_collections.ConfigDict, partition: Partition, allowed_tokens: int
) -> Callable[..., jax.Array]:
    """Returns (parameters, tokens, index, places, targets) -> right (B,)."""
    mesh = partition.mesh
    sequences = text.model(config, partition).structure
    few_tokens = text.model(config, StationaryPartition(mesh)).structure
    ring, mask = base.ring_attention(config, partition), document_mask(config)

    def right(
        parameters: Any,
        tokens: jax.Array,
        index: jax.Array,
        places: jax.Array,
        targets: jax.Array,
    ) -> jax.Array:
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
        scores = decode.logits(nnx.merge(few_tokens, parameters), chosen)
        likeliest = scores[..., :allowed_tokens].argmax(axis=-1)
        return ((likeliest == targets) | (places == NO_PLACE)).all(axis=1)

    return right
