"""Chat templates: conversations as tokens, and which of them have a loss.

A template is Jinja, as published models have theirs, and is rendered as transformers
does, in a sandbox. What it writes as a special token is one; the same name in people's
words is text. A reply is what comes after the prompt that asks for it, up to the token
that ends it: exactly the tokens that a model is asked to write are supervised.

Templates of `FORMATS` are in data/chat/formats. Where a published one puts the system's
words before the last question (Mistral) or refuses them (Gemma 1 and 2), they stand
before the first question, so that all replies are learned with them, and no token
changes when a conversation goes on.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np

from data.chat.renderer import RENDERER
from data.text.prefix_tree import Document, as_mask
from data.text.tokenizer import Tokenizer
from data.text.tokenizer_files import read_chat_template

Message = Mapping[str, str]
"""A turn: its "role" ("system", "user" or "assistant"), and its words, "content"."""

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters. One of them breaks up special-token names in user text."""
OWN = "own"
"""Name of the template that a tokenizer or a corpus comes with."""
_CHATML = "<|im_start|>", "<|im_end|>"
_INST = "[INST]", "[/INST]"
FORMATS: Mapping[str, Sequence[str]] = {
    "vicuna": ["Vicuna 1.1"],
    "llama2": ["Llama 2"],
    "llama3": ["Llama 3", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "chatml": ["Qwen", *_CHATML],
    "qwen2": ["Qwen", *_CHATML],
    "qwen2.5": ["Qwen", *_CHATML],
    "gemma": ["Gemma", "<start_of_turn>", "<end_of_turn>"],
    "mistral-v1": ["Mistral v1"],
    "mistral": ["Mistral v3", *_INST],
    "mistral-v7": ["Mistral v7", *_INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"],
    "olmo2": ["OLMo 2"],
}
"""Names of templates: the family whose tokenizers have their special tokens, and which
these are, besides bos_token and eos_token."""


class ChatTemplate:
    """Writes conversations in a template, with the ids of a tokenizer.

    name: for messages. source: the template.
    end: id of the token that ends a reply.

    Raises:
      ValueError: the template is not one, fails, or ends a reply with no special token.
    """

    def __init__(self, name: str, source: str, tokenizer: Tokenizer):
        self.name, self.source, self.tokenizer = name, source, tokenizer
        self._names, self._special = _patterns(tokenizer)
        self._end_name = self._end()
        self.end = tokenizer.special[self._end_name]

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Pickles its arguments."""
        return type(self), (self.name, self.source, self.tokenizer)

    def prompt(self, messages: Sequence[Message], reply: str = "") -> np.ndarray:
        """Returns the tokens up to where the next reply begins, int32 (n,).

        reply: text that it begins with, which is then there too.

        Raises:
          ValueError: the template refuses the conversation.
        """
        begun = {"role": "assistant", "content": reply}
        (*messages, begun), mark = self._marked([*messages, begun])
        text = self._render(messages, asks=True)
        places = _places(text, self._prompts(messages).values()) | {len(text): 0.0}
        return self._encode(text + begun["content"], mark, places).tokens

    def documents(
        self, messages: Sequence[Message], weights: Sequence[float] = ()
    ) -> list[Document]:
        """Encodes a conversation that ends with a reply, and finds the replies.

        It is one document. But where a template writes earlier turns otherwise than it
        wrote them as the last, as without their thoughts, replies are learned in
        documents of their own, which end with them.

        weights: of each reply's loss; () for 1.

        Raises:
          ValueError: the template refuses the conversation.
        """
        messages, mark = self._marked(messages)
        whole, prompts = self._render(messages, asks=False), self._prompts(messages)
        places, documents = _places(whole, prompts.values()), []
        weights = weights or [1.0] * len(prompts)
        for (number, prompt), weight in zip(prompts.items(), weights, strict=True):
            text = self._render(messages[: number + 1], asks=False)
            if not text.startswith(prompt):
                asked = prompt[len(commonprefix([text, prompt])) :]
                raise ValueError(
                    f"the chat template {self.name} writes a reply otherwise than where"
                    f" it asks for one, with {asked[:80]!r}: take that out of what it "
                    "adds for add_generation_prompt, or choose another template"
                )
            behind = text[len(prompt) :].partition(self._end_name)
            if whole.startswith(prompt + behind[0] + behind[1]):
                places[len(prompt)] = weight
            elif weight:
                here = _places(text, prompts.values()) | {len(prompt): weight}
                documents.append(self._encode(text, mark, here))
        if any(places.values()):
            documents.append(self._encode(whole, mark, places))
        return documents

    def _prompts(self, messages: Sequence[Message]) -> dict[int, str]:
        """Returns the text that asks for each reply, by its number."""
        return {
            number: self._render(messages[:number], asks=True)
            for number, message in enumerate(messages)
            if message["role"] == "assistant"
        }

    def _render(self, messages: Sequence[Message], *, asks: bool) -> str:
        names = self.tokenizer.names
        options = {"tools": None, "documents": None, "add_generation_prompt": asks}
        try:
            return RENDERER.render(self.source, messages, {**options, **names}).text
        except ValueError as error:
            raise ValueError(f"the chat template {self.name} {error}") from error

    def _marked(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """Breaks up names of special tokens in the words; returns by what, too."""
        words = "".join(message["content"] for message in messages)
        mark = next((mark for mark in MARKS if mark not in words), "")
        if not mark:
            raise ValueError(
                "messages contain all 32 Unicode noncharacters: leave one out"
            )

        def broken(text: str) -> str:
            while self._names.search(text):
                text = self._names.sub(lambda name: mark.join(name[0]), text)
            return text

        return [{**m, "content": broken(m["content"])} for m in messages], mark

    def _encode(self, text: str, mark: str, replies: Mapping[int, float]) -> Document:
        """Encodes a conversation: special tokens, and the text between two of them.

        mark: to be taken out of that text.
        replies: where in the text they begin, and the weight of each's loss.
        """
        # Of each part its special token or None, and the weight of its loss; its text,
        # and the text's part before a reply, if one begins in it.
        parts, texts, place, weight = [], [], 0, 0.0
        for part in filter(None, self._special.split(text)):
            begin = next((at for at in replies if 0 <= at - place < len(part)), place)
            prompt, behind = part[: begin - place], replies.get(begin, weight)
            place += len(part)
            name = self._names.search(part)  # without blanks that it takes
            if name is None:
                parts.append((None, behind))
                texts += [part.replace(mark, ""), prompt.replace(mark, "")]
                weight = behind
                continue
            token = self.tokenizer.special[name[0]]
            # A reply may begin in the blanks.
            parts.append((token, weight if prompt else behind))
            texts += ["", ""]
            weight = behind if token != self.end else 0.0
        # All but the first part stand behind a special token.
        encoded = self.tokenizer.encode_all(texts[:2])
        encoded += self.tokenizer.encode_all(texts[2:], is_behind=True)
        found = []
        for number, (token, weight) in enumerate(parts):
            tokens, prompt = encoded[2 * number : 2 * number + 2]
            if token is not None:
                tokens = np.array([token], np.int32)
            elif not np.array_equal(tokens[: prompt.size], prompt):
                # A token lies over the border. The prompt is asked with its own.
                whole, asked = texts[2 * number : 2 * number + 2]
                rest = [whole.removeprefix(asked)]
                (rest,) = self.tokenizer.encode_all(rest, is_behind=True)
                tokens = np.concatenate([prompt, rest])
            is_reply = np.arange(tokens.size) >= prompt.size
            found.append((tokens, is_reply * np.float32(weight)))
        tokens, weights = map(np.concatenate, zip(*found, strict=True))
        return Document(tokens, as_mask(weights))

    def _end(self) -> str:
        """Finds the name of the token behind a reply."""
        said = {"user": "x", "assistant": "REPLY"}
        messages = [{"role": role, "content": words} for role, words in said.items()]
        after = self._render(messages, asks=False).rpartition("REPLY")[2]
        found = self._names.match(after.lstrip())
        if found is None:
            raise ValueError(
                f"the chat template {self.name} has no special token behind a reply, "
                f"but {after[:80]!r}, and nothing would end one: choose another "
                "template, or a tokenizer.json that has the token's name in "
                'added_tokens with "special": true'
            )
        return found[0]


def format_source(name: str) -> str:
    """Returns the template of one of FORMATS."""
    return (Path(__file__).parent / "formats" / f"{name}.jinja").read_text("utf-8")


def open_template(
    name: str, tokenizer: Tokenizer, corpus: Path | None = None
) -> ChatTemplate:
    """Opens the template of this name.

    name: one of FORMATS; or `OWN`, which is the corpus', or else the tokenizer's.

    Raises:
      ValueError: a template is missing; or the tokenizer lacks one of its tokens, or
        takes one's name in a text for the token.
    """
    if name != OWN:
        _check_tokens(name, tokenizer)
        return ChatTemplate(name, format_source(name), tokenizer)
    places = [corpus] if corpus else []
    places += [tokenizer.path.parent] if tokenizer.path else []
    for place in places:
        source = read_chat_template(place)
        if source is not None:
            return ChatTemplate(f"of {place}", source, tokenizer)
    where = " or ".join(map(str, places)) or f"the {tokenizer.name} tokenizer"
    raise ValueError(
        f"there is no chat template in {where}: name one of {', '.join(FORMATS)}, "
        "or give the tokenizer of a chat model"
    )


def _check_tokens(template: str, tokenizer: Tokenizer) -> None:
    family, *names = FORMATS[template]
    named = {name: tokenizer.token_id(name) for name in names}
    missing = [name for name, token in named.items() if token is None]
    if missing:
        raise ValueError(
            f"the {tokenizer.name} tokenizer has no token {', '.join(missing)}, "
            f"which the template {template} needs: take that of {family}, or another "
            "template"
        )
    for name, token in named.items():
        if name not in tokenizer.special:
            raise ValueError(
                f"the {tokenizer.name} tokenizer takes {name} in a text for the "
                f"token {token}, so that words could end a turn: take a tokenizer."
                f'json whose added_tokens have it with "special": true'
            )


def _places(text: str, prompts: Iterable[str]) -> dict[int, float]:
    """Returns where in a text replies begin, as places that are not learned."""
    return {len(prompt): 0.0 for prompt in prompts if text.startswith(prompt)}


def _patterns(tokenizer: Tokenizer) -> tuple[re.Pattern, re.Pattern]:
    """Returns what finds names of special tokens, and with the blanks that they take.

    The second is a group, for `split`.
    """
    longest_first = sorted(tokenizer.special, key=len, reverse=True)
    # One letter could not be broken up by a mark.
    names = [name for name in longest_first if len(name) > 1]

    def with_blanks(name: str) -> str:
        left, right = tokenizer.strips.get(name, (False, False))
        return r"\s*" * left + re.escape(name) + r"\s*" * right

    never = "(?!)"
    found = "|".join(map(re.escape, names)) or never
    return re.compile(found), re.compile(
        f"({'|'.join(map(with_blanks, names)) or never})"
    )
