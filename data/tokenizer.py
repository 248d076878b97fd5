"""Tokenizers: text to token ids and back.

`open_tokenizer` chooses one: plain bytes, which needs no file and no library, a
Hugging Face `tokenizer.json`, or a SentencePiece `.model` (LLaMA 1 and 2).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

# What published tokenizers call the token that ends a document.
END_OF_DOCUMENT_NAMES = ("</s>", "<|endoftext|>", "<|end_of_text|>")


class Tokenizer(Protocol):
    """What a new tokenizer has to provide.

    name: its kind, one word.
    path: the file it was read from, None where there is none.
    vocab_size: all ids are below it.
    end_of_document: the id that follows the last token of every document.
    """

    name: str
    path: Path | None
    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text` alone, int32 (n,): nothing is put before or after it."""

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for each of many texts, on all cores where the library can."""

    def decode(self, ids: np.ndarray) -> str:
        """Text of the ids (n,), leaving out special ones such as end of document."""

    def token_id(self, name: str) -> int | None:
        """The id of the token with this name, as "<s>"; None if there is none."""


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, and 256 ends a document."""

    name = "bytes"
    path = None
    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        """Bytes that are no UTF-8, as in the middle of a letter, become U+FFFD.

        Raises:
          ValueError: an id is not in the vocabulary.
        """
        ids = np.asarray(ids, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"ids from {ids.min()} to {ids.max()} are not all bytes: they must be "
                f"from 0 to {self.vocab_size - 1}"
            )
        text = ids[ids != self.end_of_document].astype(np.uint8)
        return text.tobytes().decode("utf-8", errors="replace")

    def token_id(self, name: str) -> int | None:
        return None


class HuggingFaceTokenizer:
    """A `tokenizer.json`, read by the `tokenizers` library.

    Truncation and padding that the file asks for are switched off: documents are
    encoded whole. The name of a special token in a text is text like any other.

    Raises:
      ValueError: the file is no tokenizer, or has no token that ends a document.
    """

    name = "huggingface"

    def __init__(self, path: Path):
        import tokenizers

        self.path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is no tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The number of entries is too small where the ids have gaps.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        named = [name for name in END_OF_DOCUMENT_NAMES if name in vocabulary]
        if not named:
            raise ValueError(
                f"{path} has no token to end a document with, none of "
                f"{', '.join(END_OF_DOCUMENT_NAMES)}: add one of them to its vocabulary"
            )
        self.end_of_document = vocabulary[named[0]]

    def encode(self, text: str) -> np.ndarray:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist())

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)


class SentencePieceTokenizer:
    """A SentencePiece `.model`.

    Raises:
      ValueError: the file is no model, or its model has no end-of-sentence id.
    """

    name = "sentencepiece"

    def __init__(self, path: Path):
        import sentencepiece

        self.path = path
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is no SentencePiece model: {error}") from error
        self.vocab_size = self._model.vocab_size()
        self.end_of_document = self._model.eos_id()
        if self.end_of_document < 0:
            raise ValueError(
                f"{path} has no end-of-sentence id to end a document with: train the "
                "model with an eos_id"
            )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._model.encode(text, out_type=int), np.int32)

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._model.encode(list(texts), out_type=int)
        return [np.array(ids, np.int32) for ids in encodings]

    def decode(self, ids: np.ndarray) -> str:
        return self._model.decode(np.asarray(ids).tolist())

    def token_id(self, name: str) -> int | None:
        found = self._model.piece_to_id(name)  # that of the unknown, if there is none
        return found if self._model.id_to_piece(found) == name else None


def open_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer that `spec` names: "bytes", a `.json` path or a `.model` path.

    Raises:
      ValueError: the name or its ending is not known, or the file is not what its
        ending says.
      FileNotFoundError: there is no such file.
    """
    if spec == ByteTokenizer.name:
        return ByteTokenizer()
    kinds = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    path = Path(spec)
    if path.suffix not in kinds:
        raise ValueError(
            f'tokenizer "{spec}" is not known: give "bytes", the path of a Hugging '
            "Face tokenizer.json, or the path of a SentencePiece .model"
        )
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer file {path} does not exist")
    return kinds[path.suffix](path)
