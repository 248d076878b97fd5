"""Reads published tokenizers: Hugging Face's and SentencePiece's files.

The files of the model that lie beside one say which tokens begin and end a text
(data/text/tokens/tokenizer_files.py).
"""

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.remote import as_path, reach
from data.text.tokens.tokenizer import (
    END_OF_DOCUMENT_NAMES,
    ByteTokenizer,
    Tokenizer,
)
from data.text.tokens.tokenizer_files import (
    TOKENIZER_CONFIG,
    read_names,
    read_stop_tokens,
)

if TYPE_CHECKING:
    import tokenizers

UNKNOWN = "\U0010fffd"  # letter of no alphabet
LARGEST_ID = (1 << 31) - 1
EVERY_BYTE = "".join(map(chr, [*range(0x800), *range(0x800, 0xD800, 0x40)])) + "".join(
    map(chr, range(0xE000, 0x110000, 0x1000))
)
"""A text whose UTF-8 has every byte that any text can have."""
UTF8_BYTES = sorted({*EVERY_BYTE.encode()})


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
