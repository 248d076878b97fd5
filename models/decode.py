"""Generation: the prompt at once through the ring, then token by token.

Rows of a batch go their own way: prompts may differ in length, and a row that has ended
waits for the others. A prompt that begins with what is in the cache goes on from there.
A prompt may have several samples: they branch off one row of the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import EMPTY, Cache

NOTHING = -1
"""Token of a row that has ended."""


def last_of_rows(hidden: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Selects each row's last token, of any order: hidden (B, 1, E), index (B, 1)."""
    place = jnp.where(index == EMPTY, -1, index)  # (B, T)
    last = place.max(axis=1, keepdims=True)
    is_last = (place == last)[..., None]
    return jnp.where(is_last, hidden, 0).sum(axis=1, keepdims=True), last


MOST_BLOCKS = 8
"""Of new tokens that always go on from a cache, however few are in it."""


def _shared(prompt: np.ndarray, row: Sequence[int]) -> int:
    """Counts the tokens that a prompt (n,) and a row begin with alike."""
    size = min(len(prompt), len(row))
    return int(np.argmin(np.append(prompt[:size] == np.array(row[:size]), False)))


@dataclass
class Held:
    """A cache that one text leaves for the next.

    tokens: those in the cache, of each row and its first sample.
    """

    cache: Cache | None = None
    tokens: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class Generator:
    """Compiled programs, and the shapes that they were compiled for.

    empty: () -> cache.
    prefill: (parameters, empty cache, tokens, index, seed) -> (cache, next tokens
      (B, samples), their index). tokens, index: int32 (B, T) in layout order; `EMPTY`
      is the index of padding, which comes after a row's last token.
    step: (parameters, cache, tokens (B, m), index (B, m), seed, trunk) -> the same.
      trunk: as of `cache.append`. cut: as `cache.cut`. All take the cache's place.
    place: from an array of the host, (B, T), to the mesh.
    order: from T to the indices in layout order, (T,).
    divisor: T is a multiple of it.
    rows, slots: B and S. members: of the ring, that share out the slots.
    samples: of each prompt.
    block: m of the tokens of a prompt that goes on; 0: none can.
    """

    empty: Callable[[], Cache]
    prefill: Callable[..., tuple[Cache, jax.Array, jax.Array]]
    step: Callable[..., tuple[Cache, jax.Array, jax.Array]]
    cut: Callable[[Cache, np.ndarray], Cache]
    place: Callable[[np.ndarray], jax.Array]
    order: Callable[[int], np.ndarray]
    divisor: int
    rows: int
    slots: int
    members: int
    samples: int
    block: int

    def room(self, taken: int) -> int:
        """Returns how many tokens a sample may get where some slots are taken.

        The last one drawn is never put into the cache. The samples' tokens of a step go
        to one member, and fewer slots than they need may be left on each.
        """
        free = self.slots - taken - self.members * (self.samples - 1)
        return free // self.samples + 1

    def check(self, prompts: Sequence[np.ndarray], max_tokens: int) -> None:
        """Refuses what does not go into the cache.

        Raises:
          ValueError: as `generate`.
        """
        if len(prompts) != self.rows:
            raise ValueError(
                f"prompts must be {self.rows}, rows of the batch, got {len(prompts)}"
            )
        for number, prompt in enumerate(map(np.asarray, prompts)):
            is_whole = np.issubdtype(prompt.dtype, np.integer) or not prompt.size
            if prompt.ndim != 1 or not is_whole:
                raise ValueError(
                    f"prompt {number} must be integers (tokens,), got {prompt.dtype} "
                    f"{prompt.shape}"
                )
            if prompt.size and not 0 <= prompt.min() <= prompt.max() < EMPTY:
                raise ValueError(
                    f"prompt {number} must be token ids from 0 on, got "
                    f"{prompt.min()} to {prompt.max()}"
                )
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) < 1:
            raise ValueError(
                f"prompt {lengths.index(0)} has no tokens: give it at least one"
            )
        if max_tokens < 1 or max_tokens != int(max_tokens):
            raise ValueError(f"{max_tokens=} must be at least 1, a whole number")
        room = self.room(max(lengths))
        if max_tokens > room:
            fewer = f"ask for at most {room} tokens" if room > 0 else "shorten it"
            many = f" ({self.samples} samples a row)" if self.samples > 1 else ""
            raise ValueError(
                f"a prompt of {max(lengths)} tokens and {max_tokens=}{many} do not go "
                f"into the cache of {self.slots} tokens: {fewer}, or make the cache "
                "larger"
            )

    def generate(
        self,
        parameters: Any,
        prompts: Sequence[np.ndarray],
        max_tokens: int,
        seed: int,
        stop_tokens: Sequence[int] = (),
        held: Held | None = None,
    ) -> Iterator[np.ndarray]:
        """Yields the next tokens, int32 (samples * B,), as they come.

        Sample i of row r is at i * B + r.

        prompts: int (n,) each, of any lengths.
        max_tokens: that a sample gets at most.
        seed: of the random numbers, from 0; each place and step draws its own, however
          many samples there are.
        stop_tokens: after one of them a sample has ended, and gets `NOTHING`. When all
          have, so has the iterator.
        held: what a text before left, and this one leaves; of a prompt that begins
          like it, the rest alone is computed.

        Raises:
          ValueError: before anything is computed: not one prompt for each row, a
            prompt without tokens, or more tokens than the cache has slots.
        """
        self.check(prompts, max_tokens)
        texts = [np.asarray(prompt, np.int32) for prompt in prompts]
        held = Held() if held is None else held

        def draw() -> Iterator[np.ndarray]:
            found = self._go_on(parameters, texts, max_tokens, seed, held)
            if found is None:
                held.cache = None  # before there is another
                tokens, index = map(self.place, self.padded(texts))
                found = self.prefill(parameters, self.empty(), tokens, index, seed)
            held.cache, tokens, index = found
            held.tokens = [text.tolist() for text in texts]
            lengths = np.array([len(text) for text in texts], np.int32)
            trunk = lengths if self.samples > 1 else None
            ended = np.zeros(self.samples * self.rows, bool)
            for number in range(max_tokens):
                drawn, is_last = tokens, number + 1 == max_tokens
                if not is_last:
                    # Started before the last tokens are looked at, so that devices need
                    # not wait for the host.
                    given = parameters, held.cache, drawn, index, seed, trunk
                    held.cache, tokens, index = self.step(*given)
                drawn = np.asarray(drawn).T.reshape(-1)  # (samples * B,)
                if not is_last:
                    first = drawn[: self.rows].tolist()
                    for row, token in zip(held.tokens, first, strict=True):
                        row.append(token)
                yield np.where(ended, NOTHING, drawn)
                ended |= np.isin(drawn, stop_tokens)
                if ended.all():
                    return

        return draw()

    def _go_on(
        self,
        parameters: Any,
        prompts: Sequence[np.ndarray],
        max_tokens: int,
        seed: int,
        held: Held,
    ) -> tuple[Cache, jax.Array, jax.Array] | None:
        """Appends what the prompts have more than the cache; None: it does not pay.

        The ring reads whole prompts faster than blocks do, so prompts of which most is
        new go that way, and those whose rows take more slots than there are.
        """
        if held.cache is None or not self.block:
            return None
        # One token is left: the next one is drawn behind it.
        pairs = zip(prompts, held.tokens, strict=True)
        read = np.array([_shared(prompt[:-1], row) for prompt, row in pairs], np.int32)
        lengths = np.array([prompt.size for prompt in prompts])
        new = int((lengths - read).max())
        if not read.all() or new > max(int(read.min()), MOST_BLOCKS * self.block):
            return None
        cache, held.cache = self.cut(held.cache, read), None
        filled = np.array(cache.filled)
        share, tokens, index = self.slots // filled.size, None, None
        if self.room(int(filled.sum()) + new) < max_tokens:
            return None
        while (read < lengths).any():
            member = filled.argmin()
            size = self.block if filled[member] + self.block <= share else 1
            places = read[:, None] + np.arange(size)  # (B, m)
            there = places < lengths[:, None]
            behind = [
                prompt[places[row][there[row]]] for row, prompt in enumerate(prompts)
            ]
            block = np.zeros(places.shape, np.int32)
            block[there] = np.concatenate(behind)
            places = np.where(there, places, EMPTY).astype(np.int32)
            found = self.step(parameters, cache, block, places, seed)
            cache, drawn = found[0], found[1:]
            reads = there.any(axis=1, keepdims=True)
            if tokens is not None:  # those of rows that had ended before stay
                drawn = tuple(map(partial(jnp.where, reads), drawn, (tokens, index)))
            tokens, index = drawn
            filled[member] += there.sum(axis=1).max()
            read = np.minimum(read + size, lengths)
        return cache, tokens, index

    def padded(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens and index (B, T), in layout order.

        T is a power of two times the divisor where the cache allows it, so that prompts
        of like lengths share a program.
        """
        longest = max(len(prompt) for prompt in prompts)
        length = self.divisor
        while length < longest:
            length *= 2
        length = min(length, self.slots)
        tokens = np.zeros((self.rows, length), np.int32)
        index = np.full((self.rows, length), EMPTY, np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
            index[row, : len(prompt)] = np.arange(len(prompt))
        order = self.order(length)
        return tokens[:, order], index[:, order]
