"""Turns text into token ids and back; bytes need no file and no library."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

# What published tokenizers call the token that ends a document, or else a turn. Gemma's
# "</s>" is a tag of HTML, so its "<eos>" comes before.
END_OF_DOCUMENT_NAMES = (
    "<eos>",
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<end_of_turn>",
)


class Tokenizer:
    """A tokenizer of any kind.

    name: its kind, one word. path: the file it was read from, None for bytes.
    vocab_size: all ids are below it.
    begin_of_document: ids before the first token of every document and prompt, or ().
    stop_tokens: ids that end a generated text, the one that ends a document first.
    special: ids of the tokens that no text is encoded to, by their names.
    strips: whether one of them takes the blanks before it, and behind it; else neither.
    names: of "eos_token", and of "bos_token" and others where there is one.
    """

    name: str
    path: Path | None = None
    vocab_size: int
    begin_of_document: tuple[int, ...] = ()
    stop_tokens: tuple[int, ...]
    special: Mapping[str, int]
    strips: Mapping[str, tuple[bool, bool]] = {}
    names: Mapping[str, str]

    def __reduce__(self) -> tuple[type, tuple[Path, ...]]:
        """Pickles the path alone."""
        return type(self), (self.path,) if self.path else ()

    def use_one_thread(self) -> None:
        """Keeps `encode_all` to one thread, in a process beside others that encode."""

    @property
    def end_of_document(self) -> int:
        """Id that follows the last token of every document."""
        return self.stop_tokens[0]

    @property
    def largest_text_id(self) -> int:
        """Largest id that texts, their begin or end have; of other special ones none.

        A model of texts may have fewer rows than its tokenizer has ids, as one of
        images.
        """
        unused = {*self.special.values()}
        unused -= {*self.begin_of_document, *self.stop_tokens}
        largest = self.vocab_size - 1
        while largest in unused:
            largest -= 1
        return largest

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of `text` alone, int32 (n,): nothing before or after it."""
        return self.encode_all([text])[0]

    def encode_all(
        self, texts: Sequence[str], *, is_behind: bool = False
    ) -> list[np.ndarray]:
        """Encodes each of many texts, on all cores where the library can.

        is_behind: whether they stand behind a special token, where some tokenizers put
          no space.
        """
        raise NotImplementedError

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of the ids (n,), without special ones as end of document.

        Raises:
          ValueError: an id is not in the vocabulary.
        """
        ids = np.asarray(ids, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"ids must be in the vocabulary, from 0 to {self.vocab_size - 1}, got "
                f"{ids.min()} to {ids.max()}"
            )
        return self._decode(ids.tolist())

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def token_id(self, name: str) -> int | None:
        """Returns the id of the token of this name, as "<s>"; None if none."""
        return None

    def token_name(self, token: int) -> str | None:
        """Returns the name of the token of this id; None if none."""
        return None


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8, and 256 ends a document.

    Bytes that are not UTF-8, as half a letter, are decoded to U+FFFD.
    """

    name = "bytes"
    vocab_size = 257
    stop_tokens = (256,)
    special: Mapping[str, int] = {"<end>": 256}
    names: Mapping[str, str] = {"eos_token": "<end>"}

    def encode_all(
        self, texts: Sequence[str], *, is_behind: bool = False
    ) -> list[np.ndarray]:
        return [
            np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
            for text in texts
        ]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def begun(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Returns a text's ids after those that begin a document, int32 (n,)."""
    begin = np.array(tokenizer.begin_of_document, np.int32)
    return np.concatenate([begin, ids], dtype=np.int32)


_UNFINISHED = "\ufffd"
_CONTEXT = 8  # tokens before the new ones that decide on the space between them


class TextStream:
    """Decodes tokens one by one into text that never has to be taken back.

    A letter may be made of several tokens: it is held back until the last of them.
    What comes out in all is what the tokenizer decodes at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        """Begins with a prompt: the tokens before the first new one, int (n,)."""
        self._tokenizer = tokenizer
        self._ids = [int(token) for token in prompt[-_CONTEXT:]]
        self._known = len(self._ids)  # tokens whose text is out
        self._shown = len(self._decode(self._ids))  # letters of `_ids` that are out

    def push(self, token: int) -> str:
        """Returns the text that this token completes: a word, or nothing yet."""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        finished = text.rstrip(_UNFINISHED)
        new = finished[self._shown :]
        self._shown = max(self._shown, len(finished))
        if finished == text:
            self._ids = self._ids[self._known :] or self._ids  # context of the next
            self._known = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return new

    def finish(self) -> str:
        """Returns what was held back for a letter that is not completed."""
        return self._decode(self._ids)[self._shown :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(np.array(ids, np.int32))
