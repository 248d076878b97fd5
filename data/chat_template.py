"""Chat templates: how conversations are written, and which parts have a loss.

A template gives the pieces of one exchange after the other. Pieces are encoded each by
itself, so what is supervised is known by construction: the assistant's words and the
token that ends its turn.
"""

from dataclasses import dataclass
from typing import Protocol

from data.tokenizer import Tokenizer

BEGIN_NAMES = ("<s>", "<|begin_of_text|>")


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


class ChatTemplate(Protocol):
    """Interface of a template. Words come without spaces at their ends."""

    def opening(self, system: str | None, user: str, reply: str) -> list[Piece]:
        """Returns the first exchange and what precedes it."""

    def following(self, user: str, reply: str) -> list[Piece]:
        """Returns any other exchange."""


class Vicuna:
    """SYSTEM USER: … ASSISTANT: …</s>USER: … ASSISTANT: …</s> (Vicuna 1.1)."""

    SYSTEM = (
        "A chat between a curious user and an artificial intelligence assistant. The "
        "assistant gives helpful, detailed, and polite answers to the user's questions."
    )

    def __init__(self, tokenizer: Tokenizer):
        self._begin = _begin(tokenizer)
        self._end = tokenizer.end_of_document

    def opening(self, system: str | None, user: str, reply: str) -> list[Piece]:
        head = Piece(self.SYSTEM if system is None else system)
        question = Piece(f" USER: {user} ASSISTANT:")
        return [*self._begin, head, question, *self._answer(reply)]

    def following(self, user: str, reply: str) -> list[Piece]:
        return [Piece(f"USER: {user} ASSISTANT:"), *self._answer(reply)]

    def _answer(self, reply: str) -> list[Piece]:
        words = Piece(f" {reply}", is_supervised=True)
        return [words, Piece(token=self._end, is_supervised=True)]


class Llama2:
    """<s>[INST] <<SYS>>…<</SYS>> … [/INST] … </s> for each exchange (Llama 2 chat)."""

    def __init__(self, tokenizer: Tokenizer):
        self._begin = _begin(tokenizer)
        self._end = tokenizer.end_of_document

    def opening(self, system: str | None, user: str, reply: str) -> list[Piece]:
        if system is not None:
            user = f"<<SYS>>\n{system}\n<</SYS>>\n\n{user}"
        return self.following(user, reply)

    def following(self, user: str, reply: str) -> list[Piece]:
        return [
            *self._begin,
            Piece(f"[INST] {user} [/INST]"),
            Piece(f" {reply} ", is_supervised=True),
            Piece(token=self._end, is_supervised=True),
        ]


class Llama3:
    """Headers with the role, and <|eot_id|> after every turn (Llama 3 instruct).

    Raises:
      ValueError: the tokenizer lacks one of Llama 3's special tokens.
    """

    NAMES = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

    def __init__(self, tokenizer: Tokenizer):
        tokens = {name: tokenizer.token_id(name) for name in self.NAMES}
        missing = [name for name, token in tokens.items() if token is None]
        if missing:
            raise ValueError(
                f"the {tokenizer.name} tokenizer has no token {', '.join(missing)}, "
                "which the template llama3 needs: take Llama 3's, or another template"
            )
        self._begin = _begin(tokenizer)
        self._start, self._stop, self._end = tokens.values()

    def opening(self, system: str | None, user: str, reply: str) -> list[Piece]:
        system_turn = (
            [] if system is None else self._turn("system", system, is_supervised=False)
        )
        return [*self._begin, *system_turn, *self.following(user, reply)]

    def following(self, user: str, reply: str) -> list[Piece]:
        return [
            *self._turn("user", user, is_supervised=False),
            *self._turn("assistant", reply, is_supervised=True),
        ]

    def _turn(self, role: str, words: str, *, is_supervised: bool) -> list[Piece]:
        return [
            Piece(token=self._start),
            Piece(role),
            Piece(token=self._stop),
            Piece("\n\n"),
            Piece(words, is_supervised=is_supervised),
            Piece(token=self._end, is_supervised=is_supervised),
        ]


TEMPLATES = {"vicuna": Vicuna, "llama2": Llama2, "llama3": Llama3}


def _begin(tokenizer: Tokenizer) -> list[Piece]:
    """Returns the token that every text begins with, where the tokenizer has one."""
    ids = (tokenizer.token_id(name) for name in BEGIN_NAMES)
    return [Piece(token=token) for token in ids if token is not None][:1]
