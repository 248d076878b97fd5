"""Generation: the prompt at once through the ring, then token by token.

Rows of a batch go their own way: prompts may differ in length, and a row that has ended
waits for the others. A prompt that begins with what is in the cache goes on from there.
A prompt may have several samples: they branch off one row of the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import EMPTY, Cache

NOTHING = -1
"""Token of a row that has ended."""


def last_of_rows(hidden: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Selects each row's last token, of any order: hidden (B, 1, E), index (B, 1)."""
    index = jnp.where(index == EMPTY, -1, index)  # (B, T)
    last = index.max(axis=1, keepdims=True)
    is_last = (index == last)[..., None]
    return jnp.where(is_last, hidden, 0).sum(axis=1, keepdims=True), last


MOST_BLOCKS = 8
"""Blocks of new tokens that are always appended, however few tokens a cache holds."""


def _shared(prompt: np.ndarray, row: Sequence[int]) -> int:
    """Counts the first tokens in which a prompt (n,) and a row agree."""
    size = min(len(prompt), len(row))
    agrees = prompt[:size] == np.array(row[:size])
    return int(np.argmin(np.append(agrees, False)))


def _block_of(
    prompts: Sequence[np.ndarray], read: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the next tokens of prompts and their index, int32 (B, size) both.

    read: (B,), tokens before these. `EMPTY` is the index behind a prompt's end.
    """
    tokens = np.zeros((len(prompts), size), np.int32)
    index = np.full((len(prompts), size), EMPTY, np.int32)
    for row, prompt in enumerate(prompts):
        begin = read[row]
        new = prompt[begin : begin + size]
        tokens[row, : len(new)] = new
        index[row, : len(new)] = np.arange(begin, begin + len(new))
    return tokens, index


@dataclass
class Held:
    """A cache that one text leaves for the next.

    tokens: in the cache, of each row: its prompt and its first sample.
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
      trunk: as of `cache.append`.
    cut: as `cache.cut`. Like the two above it reuses the memory of the cache it takes.
    to_mesh: from an array of the host, (B, T), to the mesh.
    order: from T to the indices in layout order, (T,).
    divisor: T is a multiple of it.
    vocab_size: rows of the embedding, which tokens are below.
    rows, slots: B and S. members: devices of the ring, which share out the slots.
    samples: of each prompt.
    block: tokens m that are appended at a time where a prompt goes on from a cache; 0:
      no prompt can.
    """

    empty: Callable[[], Cache]
    prefill: Callable[..., tuple[Cache, jax.Array, jax.Array]]
    step: Callable[..., tuple[Cache, jax.Array, jax.Array]]
    cut: Callable[[Cache, np.ndarray], Cache]
    to_mesh: Callable[[np.ndarray], jax.Array]
    order: Callable[[int], np.ndarray]
    divisor: int
    vocab_size: int
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
        """Refuses prompts and numbers of tokens that do not fit the cache.

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
            size = self.vocab_size
            if prompt.size and not 0 <= prompt.min() <= prompt.max() < size:
                raise ValueError(
                    f"prompt {number} must be token ids from 0 to {size - 1}, which "
                    f"the model has, got {prompt.min()} to {prompt.max()}"
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
            remedy = f"ask for at most {room} tokens" if room > 0 else "shorten it"
            samples = f" ({self.samples} samples a row)" if self.samples > 1 else ""
            raise ValueError(
                f"a prompt of {max(lengths)} tokens and {max_tokens=}{samples} do not "
                f"go into the cache of {self.slots} tokens: {remedy}, or make the "
                "cache larger"
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
        seed: of the random numbers, from 0; every row, sample and index draws its own,
          however many samples there are.
        stop_tokens: after one of them a sample has ended, and gets `NOTHING`. When all
          have, so has the iterator.
        held: the cache that an earlier text left, which this one replaces by its own;
          of a prompt that begins as that text the rest alone is computed.

        Raises:
          ValueError: before anything is computed: not one prompt for each row, a
            prompt without tokens, or more tokens than the cache has slots.
        """
        self.check(prompts, max_tokens)
        # A generator's own body would refuse only when the first token is asked for.
        texts = [np.asarray(prompt, np.int32) for prompt in prompts]
        held = Held() if held is None else held
        return self._draw(parameters, texts, max_tokens, seed, stop_tokens, held)

    def _draw(
        self,
        parameters: Any,
        prompts: Sequence[np.ndarray],
        max_tokens: int,
        seed: int,
        stop_tokens: Sequence[int],
        held: Held,
    ) -> Iterator[np.ndarray]:
        """Yields the next tokens, as `generate`."""
        read = self._go_on(parameters, prompts, max_tokens, seed, held)
        if read is None:
            held.cache = None  # freed before there is another
            tokens, index = map(self.to_mesh, self.padded(prompts))
            read = self.prefill(parameters, self.empty(), tokens, index, seed)
        held.cache, tokens, index = read
        held.tokens = [prompt.tolist() for prompt in prompts]
        trunk = None
        if self.samples > 1:
            trunk = np.array([len(prompt) for prompt in prompts], np.int32)
        ended = np.zeros(self.samples * self.rows, bool)
        for number in range(max_tokens):
            drawn = tokens  # (B, samples), maybe still being computed
            is_last = number + 1 == max_tokens
            if not is_last:
                # Started before the last tokens are looked at, so that devices need
                # not wait for the host.
                held.cache, tokens, index = self.step(
                    parameters, held.cache, drawn, index, seed, trunk
                )
            drawn = np.asarray(drawn).T.reshape(-1)  # (samples * B,)
            if not is_last:
                # The last token is never put into the cache.
                first = drawn[: self.rows].tolist()
                for row, token in zip(held.tokens, first, strict=True):
                    row.append(token)
            yield np.where(ended, NOTHING, drawn)
            ended |= np.isin(drawn, stop_tokens)
            if ended.all():
                return

    def _go_on(
        self,
        parameters: Any,
        prompts: Sequence[np.ndarray],
        max_tokens: int,
        seed: int,
        held: Held,
    ) -> tuple[Cache, jax.Array, jax.Array] | None:
        """Appends the tokens of prompts that the cache lacks, or returns None.

        None if most of a prompt is new, as the ring reads whole prompts faster than
        blocks; or if the rows together would take more slots than there are.
        """
        if held.cache is None or not self.block:
            return None
        read = np.zeros(self.rows, np.int32)  # tokens of each prompt in the cache
        for row, prompt in enumerate(prompts):
            # One token is left to read: the next one is drawn behind it.
            read[row] = _shared(prompt[:-1], held.tokens[row])
        lengths = np.array([prompt.size for prompt in prompts])
        new = int((lengths - read).max())
        if not read.all() or new > max(int(read.min()), MOST_BLOCKS * self.block):
            return None
        cache = self.cut(held.cache, read)
        held.cache = None
        filled = np.array(cache.filled)
        if self.room(int(filled.sum()) + new) < max_tokens:
            return None
        drawn: tuple[jax.Array, jax.Array] | None = None  # behind what is read so far
        member_slots = self.slots // filled.size
        while (read < lengths).any():
            member = filled.argmin()  # where `append` puts the block
            has_room = filled[member] + self.block <= member_slots
            size = self.block if has_room else 1
            block, block_index = _block_of(prompts, read, size)
            cache, tokens, index = self.step(
                parameters, cache, block, block_index, seed
            )
            is_token = block_index != EMPTY  # (B, m)
            if drawn is not None:
                # Rows whose prompt was read before keep what was drawn then.
                reads = is_token.any(axis=1, keepdims=True)
                tokens = jnp.where(reads, tokens, drawn[0])
                index = jnp.where(reads, index, drawn[1])
            drawn = (tokens, index)
            filled[member] += is_token.sum(axis=1).max()
            read = np.minimum(read + size, lengths)
        assert drawn is not None  # at least one token of each prompt was left
        return cache, *drawn

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
