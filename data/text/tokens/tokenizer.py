"""Tokenizers: text to token ids and back.

`open_tokenizer` chooses one: plain bytes, which needs no file and no library, a
Hugging Face `tokenizer.json`, or a SentencePiece `.model` (LLaMA 1 and 2). The files of
the model that lie beside it say which tokens begin and end a text
(data/text/tokens/tokenizer_files.py).
"""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.remote import as_path, reach
from data.text.tokens.tokenizer_files import (
    TOKENIZER_CONFIG,
    read_names,
    read_stop_tokens,
)

if TYPE_CHECKING:
    import tokenizers

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
UNKNOWN = "\U0010fffd"  # letter of no alphabet
LARGEST_ID = (1 << 31) - 1
EVERY_BYTE = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x40)])) + "".join(
    map(chr, range(0xE000, 0x110000, 0x1000))
)
"""A text whose UTF-8 has every byte that any text can have."""
UTF8_BYTES = sorted({*EVERY_BYTE.encode()})


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


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizer.json`, read by the `tokenizers` library.

    A document ends with the token that the files beside it name, or else with the first
    of `END_OF_DOCUMENT_NAMES` in the vocabulary. Truncation, padding and dropout that
    the file asks for are switched off: documents are encoded whole, and always alike.
    The name of a special token in a text is text like any other.

    Raises:
      ValueError: the file is not a tokenizer, has no token that ends a document, or
        none for what its vocabulary lacks.
    """

    name = "huggingface"

    def __init__(self, path: Path):
        import tokenizers

        self.path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises nothing narrower
            line = " ".join(str(error).split())
            raise ValueError(f"{path} must be a tokenizer.json: {line}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        if getattr(self._tokenizer.model, "dropout", None) is not None:
            self._tokenizer.model.dropout = None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # The number of entries is too small where the ids have gaps.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        known = [vocabulary[n] for n in END_OF_DOCUMENT_NAMES if n in vocabulary]
        self.stop_tokens = read_stop_tokens(self) or tuple(known[:1])
        if not self.stop_tokens:
            raise ValueError(
                f"{path} has no token to end a document with, none of "
                f"{', '.join(END_OF_DOCUMENT_NAMES)}: add one of them to its vocabulary"
                f", or name another in a {TOKENIZER_CONFIG} beside it"
            )
        if self.vocab_size > LARGEST_ID:
            raise ValueError(
                f"{path} has the id {self.vocab_size - 1}, and ids are below "
                f"{LARGEST_ID}: number its vocabulary again"
            )
        self.encode(UNKNOWN)
        if self._loses_letters(vocabulary):
            raise ValueError(
                f"{path} has no token for letters that its vocabulary lacks, which "
                "would be left out of every text: give it an unk_token, byte_fallback, "
                "or all bytes"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {t.content: i for i, t in added.items() if t.special}
        self.strips = {t.content: (t.lstrip, t.rstrip) for t in added.values()}
        # What the file's post-processor puts before a text.
        encoding = self._tokenizer.encode(UNKNOWN)
        count = [*encoding.special_tokens_mask, 0].index(0)
        begin = encoding.ids[:count]
        self.begin_of_document, self.names = read_names(self, begin)

    def encode_all(
        self, texts: Sequence[str], *, is_behind: bool = False
    ) -> list[np.ndarray]:
        tokenizer = self._behind if is_behind else self._tokenizer
        try:
            encodings = tokenizer.encode_batch_fast([*texts], add_special_tokens=False)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # a panic of Rust is not an Exception
            line = " ".join(str(error).split())
            raise ValueError(
                f"{self.path} cannot encode a text ({line}): add the token that it "
                "lacks to its vocabulary, simplify its patterns, or take another "
                "tokenizer"
            ) from error
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def use_one_thread(self) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the library has no other way

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def token_name(self, token: int) -> str | None:
        return self._tokenizer.id_to_token(token)

    @cached_property
    def _behind(self) -> "tokenizers.Tokenizer":
        """The tokenizer of texts behind a special token.

        It differs where a space is put before the first word of a text alone, which is
        then not the first.
        """
        before = self._tokenizer.pre_tokenizer
        if before is None or b'"first"' not in before.__getstate__():
            return self._tokenizer
        scheme = '"prepend_scheme":"{}"'
        content = self._tokenizer.to_str()
        content = content.replace(scheme.format("first"), scheme.format("never"))
        behind = type(self._tokenizer).from_str(content)
        behind.encode_special_tokens = True
        return behind

    def _loses_letters(self, vocabulary: Mapping[str, int]) -> bool:
        """Returns whether letters that the vocabulary lacks are left out in silence.

        Of all models, BPE may do so: without a token for it, nor for every byte.
        """
        import tokenizers

        model = self._tokenizer.model
        if not isinstance(model, tokenizers.models.BPE) or model.unk_token is not None:
            return False
        if model.byte_fallback:
            return any(f"<0x{byte:02X}>" not in vocabulary for byte in UTF8_BYTES)
        level = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        )
        ((letters, _),) = level.pre_tokenize_str(EVERY_BYTE)
        return not vocabulary.keys() >= set(letters)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece `.model`.

    Raises:
      ValueError: the file is not a model, or its model has no end-of-sentence id.
    """

    name = "sentencepiece"
    _threads = -1  # as many as there are cores

    def __init__(self, path: Path):
        import sentencepiece

        self.path = path
        try:
            proto = path.read_bytes()
            self._model = sentencepiece.SentencePieceProcessor(model_proto=proto)
        except (OSError, RuntimeError, ValueError) as error:
            wrong = f"{path} must be a SentencePiece model: {error}"
            raise ValueError(wrong) from error
        self.vocab_size = self._model.vocab_size()
        end = self._model.eos_id()
        if end < 0:
            raise ValueError(
                f"{path} has no end-of-sentence id: train the model with an eos_id"
            )
        self.stop_tokens = tuple(dict.fromkeys((end, *read_stop_tokens(self))))
        control = filter(self._model.is_control, range(self.vocab_size))
        self.special = {self._model.id_to_piece(token): token for token in control}
        begin = [self._model.bos_id()] if self._model.bos_id() >= 0 else []
        self.begin_of_document, self.names = read_names(self, begin)
        word = self.encode("a")
        self._adds_space = np.array_equal(self.encode("a a"), np.r_[word, word])

    def encode_all(
        self, texts: Sequence[str], *, is_behind: bool = False
    ) -> list[np.ndarray]:
        if is_behind and self._adds_space:
            texts = [text.removeprefix(" ") for text in texts]
        encoded = self._model.encode([*texts], out_type=int, num_threads=self._threads)
        return [np.array(ids, np.int32) for ids in encoded]

    def use_one_thread(self) -> None:
        self._threads = 1

    def _decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def token_id(self, name: str) -> int | None:
        # That of the unknown token, where the name is unknown.
        token = self._model.piece_to_id(name)
        return token if self.token_name(token) == name else None

    def token_name(self, token: int) -> str | None:
        return self._model.id_to_piece(token)


def begun(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Returns a text's ids after those that begin a document, int32 (n,)."""
    begin = np.array(tokenizer.begin_of_document, np.int32)
    return np.concatenate([begin, ids], dtype=np.int32)


def open_tokenizer(spec: str) -> Tokenizer:
    """Opens the tokenizer that `spec` names: "bytes", or a path.

    The path is that of a `.json` or a `.model` file, or of a directory that has a
    tokenizer.json or, if not, a tokenizer.model.

    Raises:
      ValueError: the name or its ending is not known, or the file is not what its
        ending says.
      FileNotFoundError: the file is missing, or the directory has none.
    """
    if spec == ByteTokenizer.name:
        return ByteTokenizer()
    by_ending = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    path = as_path(spec)
    reach(path)
    if path.is_dir():
        names = [f"tokenizer{ending}" for ending in by_ending]
        inside = [path / name for name in names if (path / name).is_file()]
        if not inside:
            raise FileNotFoundError(
                f"directory {spec} has neither {' nor '.join(names)}: give the path of "
                "a tokenizer"
            )
        path = inside[0]
    if path.suffix not in by_ending:
        raise ValueError(
            f'tokenizer "{spec}" is not known: give "bytes", the path of a Hugging '
            "Face tokenizer.json, of a SentencePiece .model, or of their directory"
        )
    if not path.is_file():
        raise FileNotFoundError(f"tokenizer file {path} does not exist")
    return by_ending[path.suffix](path)


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
