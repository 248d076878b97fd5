"""Chat templates: conversations as tokens, and which of them have a loss.

A template is Jinja, as published models have theirs, and is rendered as transformers
does, in a sandbox. What it writes as a special token is one; the same name in people's
words is text, and in replies too if it could begin or end a turn. A reply is what comes
after the prompt that asks for it and what the template writes before every reply, up to
the token that ends it: exactly the tokens that a model is to write are supervised.

Templates of `FORMATS` are in data/chat/formats. Where a published one puts the system's
words before the last question (Mistral) or refuses them (Gemma 1 and 2), they stand
before the first question, so that all replies are learned with them, and no token
changes when a conversation goes on.
"""

import contextlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.chat.template_text import (
    PROBE,
    TOOLS,
    Exchange,
    TemplateText,
    replies_of,
)
from data.chat.token_names import MARKS, broken, patterns
from data.chat.turns import Message
from data.chat.written_parts import WORD, WrittenParts, result
from data.text.reading.skipped import names_special_tokens
from data.text.tokens.prefix_tree import Document, as_mask
from data.text.tokens.tokenizer import END_OF_DOCUMENT_NAMES, Tokenizer
from data.text.tokens.tokenizer_files import BEGIN_NAMES, read_chat_template

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


class _Piece(NamedTuple):
    """A special token; or a text without one, up to each reply's begin and its end.

    weights: of the token's loss, or for each text, of what it adds to the one before.
    """

    token: int | None
    texts: Sequence[str]
    weights: Sequence[float]


class ChatTemplate:
    """Writes conversations in a template, with the ids of a tokenizer.

    name: for messages. source: the template.
    end: id of the token that ends a reply.

    Raises:
      ValueError: the template is not one, fails, or ends a reply with no special token.
    """

    def __init__(self, name: str, source: str, tokenizer: Tokenizer):
        self.name = name
        self.source = source
        self.tokenizer = tokenizer
        self._names, self._special = patterns(tokenizer, tokenizer.special)
        self._text = TemplateText(name, source, tokenizer.names)
        self._parts = WrittenParts(self._text)
        self._end_name = self._end()
        self._call_end = self._end_of_calls()
        self._reserved, _ = patterns(tokenizer, self._find_reserved())
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
        marked, _, mark = self._marked(self._parts.fit([*messages, begun]), None)
        *messages, begun = marked
        asked = self._text.ask(messages)
        numbers = replies_of(messages)
        prompts = [self._text.prompt_within(asked, messages, n) for n in numbers]
        weight_at = _unlearned(asked.text, prompts) | {len(asked.text): 0.0}
        return self._encode(asked.text + begun["content"], mark, weight_at).tokens

    def documents(
        self,
        messages: Sequence[Message],
        weights: Sequence[float] = (),
        tools: Sequence[Any] | None = None,
    ) -> list[Document]:
        """Encodes a conversation that ends with a reply, and finds the replies.

        It is one document. But where a template writes earlier turns otherwise than it
        wrote them as the last, as without their thoughts, replies are learned in
        documents of their own, which end with them.

        weights: of each reply's loss; () for 1. tools: that the assistant may call.

        Raises:
          ValueError: the template refuses the conversation.
        """
        messages, tools, mark = self._marked(self._parts.fit(messages), tools)
        template = self._text.given(tools)
        whole, exchanges = template.exchanges(messages)
        begins = _unlearned(whole, exchanges)
        weight_at = dict(begins)
        documents = []
        added = template.added(messages, exchanges, mark, self._parts.example)
        weights = weights or [1.0] * len(exchanges)
        for number, turn in enumerate(replies_of(messages)):
            exchange = exchanges[number]
            self._check(exchange)
            begin = exchange.begin + added[number]
            name = self._call_end if "tool_calls" in messages[turn] else self._end_name
            reply = "".join(exchange.reply.partition(name)[:2])
            end = exchange.begin + len(reply)
            is_within = whole.startswith(reply, exchange.begin)
            if is_within and exchange.begin in begins and not weight_at.get(begin):
                weight_at[begin] = weights[number]
                weight_at.setdefault(end, 0.0)
            elif weights[number]:
                text = whole[: exchange.shared] + exchange.text
                alone = _unlearned(text, exchanges[: number + 1])
                alone |= {begin: weights[number], end: 0.0}
                documents.append(self._encode(text, mark, alone))
        if any(weight_at.values()):
            documents.append(self._encode(whole, mark, weight_at))
        return documents

    def unwritten(self, messages: Sequence[Message], tools: Any = None) -> list[str]:
        """Returns names of what a conversation has and the template leaves out."""
        return self._parts.unwritten(messages, tools)

    def _check(self, exchange: Exchange) -> None:
        """Checks that a reply is written behind the prompt that asks for it."""
        if exchange.text.startswith(exchange.prompt):
            return
        agreed = len(commonprefix([exchange.text, exchange.prompt]))
        raise ValueError(
            f"the chat template {self.name} writes a reply otherwise than where it "
            f"asks for one, with {exchange.prompt[agreed:][:80]!r}: take that out of "
            "what it adds for add_generation_prompt, or choose another template"
        )

    def stays_text(self, messages: Sequence[Message], tools: Any = None) -> bool:
        """Returns whether words have a special token's name that is text in them."""
        return self._broken(messages, tools, MARKS[0]) != ([*messages], tools)

    def _marked(
        self, messages: Sequence[Message], tools: Any
    ) -> tuple[list[Message], Any, str]:
        """Breaks up names of special tokens in all texts; returns by what, too."""
        words = json.dumps([messages, tools], ensure_ascii=False)
        mark = next((mark for mark in MARKS if mark not in words), "")
        if not mark:
            raise ValueError(
                "messages contain all 32 Unicode noncharacters: leave one out"
            )
        marked, marked_tools = self._broken(messages, tools, mark)
        return marked, marked_tools, mark

    def _broken(
        self, messages: Sequence[Message], tools: Any, mark: str
    ) -> tuple[list[Message], Any]:
        """Breaks up names that are text by a mark: in replies some are tokens."""
        marked = []
        for message in messages:
            is_reply = message["role"] == "assistant"
            names = self._reserved if is_reply else self._names
            marked.append(broken(message, names, mark))
        return marked, broken(tools, self._names, mark)

    def _encode(self, text: str, mark: str, weight_at: Mapping[int, float]) -> Document:
        """Encodes a conversation: special tokens, and the text between two of them.

        mark: to be taken out of that text.
        weight_at: where in the text replies begin and end, and the weight of the loss
          from there on.
        """
        parts = []
        begins = sorted(weight_at)
        end = 0
        weight = 0.0
        for part in filter(None, self._special.split(text)):
            start = end
            end += len(part)
            name = self._names.search(part)  # without blanks that it takes
            own_start = start + (name.start() if name else 0)
            first = bisect_left(begins, start)
            after = bisect_right(begins, own_start)
            if after > first:
                weight = weight_at[begins[after - 1]]
            # Replies that begin in this part, behind its token's blanks.
            within = begins[after : bisect_left(begins, end)]
            weights = [weight, *map(weight_at.__getitem__, within)]
            if name is None:
                cuts = [begin - start for begin in (*within, end)]
                texts = [part[:cut].replace(mark, "") for cut in cuts]
                parts.append(_Piece(None, texts, weights))
                weight = weights[-1]
                continue
            token = self.tokenizer.special[name[0]]
            parts.append(_Piece(token, [], weights[:1]))
            weight = weights[-1]  # a reply may begin or end in the blanks
        tokens, weights = self._joined(parts)
        return Document(tokens, as_mask(weights))

    def _joined(self, parts: Sequence["_Piece"]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of all parts, and the weights of their losses."""
        # All but the first part stand behind a special token.
        texts = [text for part in parts[1:] for text in part.texts]
        encoded = self.tokenizer.encode_all(parts[0].texts)
        encoded += self.tokenizer.encode_all(texts, is_behind=True)
        remaining = iter(encoded)
        joined = []
        weights = []
        for part in parts:
            tokens = np.array([] if part.token is None else [part.token], np.int32)
            weights += part.weights[: tokens.size]
            before = ""
            for text, weight in zip(part.texts, part.weights, strict=False):
                longer = next(remaining)
                if not np.array_equal(longer[: tokens.size], tokens):
                    # A token lies over the border. The prompt is asked with its own.
                    rest = text.removeprefix(before)
                    own = self.tokenizer.encode_all([rest], is_behind=True)
                    longer = np.concatenate([tokens, *own])
                weights += [weight] * (longer.size - tokens.size)
                tokens = longer
                before = text
            joined.append(tokens)
        return np.concatenate(joined), np.array(weights, np.float32)

    def _end(self) -> str:
        """Finds the name of the token behind a reply."""
        after = self._text.for_probes.render(PROBE[1:3], asks=False).text.rpartition(
            "REPLY"
        )[2]
        name = self._names.match(after.lstrip())
        if name is None:
            raise ValueError(
                f"the chat template {self.name} has no special token behind a reply, "
                f"but {after[:80]!r}, and nothing would end one: choose another "
                "template, or a tokenizer.json that has the token's name in "
                'added_tokens with "special": true'
            )
        return name[0]

    def _end_of_calls(self) -> str:
        """Finds the name of the token behind the calls of a reply."""
        example = self._parts.example
        if example is None:
            return self._end_name
        turns = [PROBE[1], example]
        after = self._text.given(TOOLS).render(turns, asks=False).text
        after = after.rpartition(WORD)[2]
        names = [self._end_name] * (self._end_name in after)
        return [*names, *self._names.findall(after), self._end_name][0]

    def _find_reserved(self) -> set[str]:
        """Finds the names of tokens that begin or end texts and turns.

        Those of others, as <think>, are tokens in replies too.
        """
        own = self.tokenizer
        template = self._text.for_probes
        reserved = {self._end_name, *END_OF_DOCUMENT_NAMES, *BEGIN_NAMES}
        reserved |= {*own.names.values(), *map(own.token_name, own.stop_tokens)}
        for name in own.special:
            if names_special_tokens(name) and name not in self.source:
                reserved.add(name)
        if self._parts.example:
            with contextlib.suppress(ValueError):
                turns = [PROBE[1], self._parts.example, result()]
                text = self._text.given(TOOLS).ask(turns).text
                # The call's own word stands before what it gave.
                _, end, behind = text.rpartition(WORD)[2].partition(self._call_end)
                reserved.update([end], self._names.findall(behind))
        for first in 0, 1:  # it may refuse words of the system
            with contextlib.suppress(ValueError):
                turns = template.render(PROBE[first:], asks=False).text
                plain = template.render(PROBE[first:2], asks=False).text
                asks = template.ask(PROBE[first:2]).text
                reserved.update(self._names.findall(plain))
                in_turns = self._names.findall(turns)
                reserved |= {*self._names.findall(asks)}.intersection(in_turns)
        return {*own.special} & reserved


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
    folders = [corpus] if corpus else []
    folders += [tokenizer.path.parent] if tokenizer.path else []
    for folder in folders:
        source = read_chat_template(folder)
        if source is not None:
            return ChatTemplate(f"of {folder}", source, tokenizer)
    where = " or ".join(map(str, folders)) or f"the {tokenizer.name} tokenizer"
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


def _unlearned(text: str, prompts: Iterable[Exchange]) -> dict[int, float]:
    """Returns where in a text replies begin, each with weight 0."""
    return {p.begin: 0.0 for p in prompts if text.startswith(p.prompt, p.shared)}
