"""Chat templates: conversations as tokens, and which of them have a loss.

A template gives the pieces of one exchange after the other. Pieces are encoded each by
itself, so what is supervised is known by construction: the assistant's words and the
token that ends its turn.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from data.chat_format import ChatFormat
from data.tokenizer import BEGIN_NAMES, Tokenizer


@dataclass(frozen=True)
class Piece:
    """A part of a conversation.

    text: to be encoded; a space at its beginning belongs to the first word.
    token: a special token in the place of text.
    is_supervised: whether it has a loss.
    """

    text: str = ""
    token: int | None = None
    is_supervised: bool = False


class Document(NamedTuple):
    """Tokens, int32 (n,), and their loss mask, bool (n,)."""

    tokens: np.ndarray
    is_supervised: np.ndarray


class ChatTemplate:
    """Writes conversations in a format, with the ids of a tokenizer.

    Words come without spaces at their ends. A special token's name in them is text.

    end: id of the token that ends a reply.
    """

    def __init__(self, chat_format: ChatFormat, tokenizer: Tokenizer):
        """Looks up the format's tokens.

        Raises:
          ValueError: the tokenizer lacks one of them, or takes one's name in a text for
            the token.
        """
        self.tokenizer = tokenizer
        self._format = chat_format
        self._tokens = self._ids()
        begin, end = chat_format.begin, chat_format.end
        names = BEGIN_NAMES if begin is None else [begin]
        begins = [tokenizer.token_id(name) for name in names if name]
        self._begin = [Piece(token=i) for i in begins if i is not None][:1]
        self.end = tokenizer.end_of_document if end is None else self._tokens[end]
        # SentencePiece's models put a space before whatever they encode.
        one, two = tokenizer.encode("a"), tokenizer.encode("a a")
        self._adds_space = np.array_equal(two, np.concatenate([one, one]))

    def exchanges(
        self, system: str | None, exchanges: Iterable[tuple[str, str]]
    ) -> list[list[Piece]]:
        """Returns the pieces of each exchange; the first has those that precede it.

        system: its words; None: none. exchanges: words of the user, and of the reply.
        """
        return [
            [*self._question(system, user, number == 0), *self._reply(reply)]
            for number, (user, reply) in enumerate(exchanges)
        ]

    def prompt(
        self, system: str | None, exchanges: Sequence[tuple[str, str]], user: str
    ) -> list[Piece]:
        """Returns the pieces of a conversation up to where the next reply begins."""
        before = self.exchanges(system, exchanges)
        return sum(before, []) + self._question(system, user, is_first=not before)

    def encode(self, parts: Sequence[Sequence[Piece]]) -> list[Document]:
        """Encodes every part, each piece of it by itself."""
        texts = [
            piece.text.removeprefix(" ") if self._adds_space else piece.text
            for pieces in parts
            for piece in pieces
            if piece.token is None
        ]
        encoded = iter(self.tokenizer.encode_all(texts))

        def document(piece: Piece) -> Document:
            special = np.array([piece.token or 0], np.int32)
            tokens = next(encoded) if piece.token is None else special
            return Document(tokens, np.full(tokens.size, piece.is_supervised))

        return [join([document(piece) for piece in pieces]) for pieces in parts]

    def _question(self, system: str | None, user: str, is_first: bool) -> list[Piece]:
        written = self._format
        system = written.system if system is None else system
        begin = self._begin if is_first or written.begins_each else []
        has_system = is_first and system is not None
        text = written.opening if has_system else written.question
        return [*begin, *self._pieces(text, system=system, user=user)]

    def _reply(self, reply: str) -> list[Piece]:
        words = self._format.reply.format(reply=reply)
        after = self._format.after
        return [
            Piece(words, is_supervised=True),
            Piece(token=self.end, is_supervised=True),
            *([Piece(after)] if after else []),
        ]

    def _pieces(self, text: str, **words: str | None) -> list[Piece]:
        """Splits a text of the format at its tokens, then puts the words in."""
        names = "|".join(map(re.escape, self._tokens)) or "(?!)"  # matches nothing
        return [
            Piece(token=self._tokens[part])
            if part in self._tokens
            else Piece(part.format(**words))
            for part in re.split(f"({names})", text)
            if part
        ]

    def _ids(self) -> dict[str, int]:
        """Returns the ids of the format's tokens, by name."""
        written, tokenizer = self._format, self.tokenizer
        names = [*written.tokens, *filter(None, (written.begin, written.end))]
        found = {name: tokenizer.token_id(name) for name in names}
        missing = [name for name, token in found.items() if token is None]
        if missing:
            raise ValueError(
                f"the {tokenizer.name} tokenizer has no token {', '.join(missing)}, "
                f"which the template {written.name} needs: take that of "
                f"{written.family}, or another template"
            )
        for name, token in found.items():
            if token in tokenizer.encode(name):
                raise ValueError(
                    f"the {tokenizer.name} tokenizer takes {name} in a text for the "
                    f"token {token}, so that words could end a turn: take a tokenizer."
                    f'json whose added_tokens have it with "special": true'
                )
        return {name: token for name, token in found.items() if token is not None}


def join(documents: Sequence[Document]) -> Document:
    """Joins documents, at least one, to one."""
    return Document(*map(np.concatenate, zip(*documents, strict=True)))
