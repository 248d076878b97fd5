"""What a chat template writes: conversations as text, and where their replies are."""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from data.chat.renderer import RENDERER, Rendering
from data.chat.turns import THOUGHTS, Message

_ROLES = {"system": "x", "user": "x", "assistant": "REPLY"}
PROBE = [{"role": role, "content": words} for role, words in _ROLES.items()]
PROBE.append(PROBE[1])
"""A conversation, with words of the system, for what a template writes around them."""

TOOL = {
    "name": "f",
    "description": "x",
    "parameters": {"type": "object", "properties": {}},
}
TOOLS = [{"type": "function", "function": TOOL}]


class Exchange(NamedTuple):
    """A reply as the last turn of a conversation, which may go on behind it.

    shared: letters that it has in common with the whole; the texts are behind them.
    prompt: asks for the reply. text: has the reply, up to its end.
    """

    shared: int
    prompt: str
    text: str

    @property
    def begin(self) -> int:
        """Letters before the reply."""
        return self.shared + len(self.prompt)

    @property
    def reply(self) -> str:
        """What stands behind the prompt."""
        return self.text[len(self.prompt) :]


class TemplateText:
    """A template, with what it may read besides the messages.

    name: for messages. names: of tokens, by their use.
    opening: what begins a reply, where the template writes no prompt for one.
    for_probes: the template with tools, if it writes nothing without any, or itself.
    """

    def __init__(self, name: str, source: str, names: Mapping[str, str]):
        self.name = name
        self.source = source
        self._names = names
        self._tools: Sequence[Any] | None = None
        self.opening = ""
        self.for_probes = self
        try:
            self.render(PROBE[1:3], asks=False)
        except ValueError as error:
            self.for_probes = self.given(TOOLS)
            try:
                self.for_probes.render(PROBE[1:3], asks=False)
            except ValueError:
                raise error from None
        self.opening = self._find_opening()

    def given(self, tools: Sequence[Any] | None) -> "TemplateText":
        """Returns the template with tools that the assistant may call; None: none."""
        text = copy.copy(self)
        text._tools = tools
        return text

    def render(self, messages: Sequence[Message], *, asks: bool) -> Rendering:
        """Renders a conversation. asks: whether for the next reply.

        Raises:
          ValueError: the template is not one, refuses it, or passes a limit.
        """
        options: dict[str, Any] = {"tools": self._tools, "documents": None}
        options |= {"add_generation_prompt": asks, **self._names}
        try:
            return RENDERER.render(self.source, messages, options)
        except ValueError as error:
            raise ValueError(f"the chat template {self.name} {error}") from error

    def exchanges(self, messages: Sequence[Message]) -> tuple[str, list[Exchange]]:
        """Returns the text of a conversation that ends with a reply, and its replies.

        It is rendered twice where it reads turn after turn, else twice for each reply.
        """
        whole = self.render(messages, asks=False)
        asked = self.ask(messages[:-1])
        if not _begins_with(whole, asked):
            asked = asked._replace(ends=None)
        exchanges = []
        for number in replies_of(messages):
            exchange = self.prompt_within(asked, messages, number)
            if number and asked.ends and whole.ends:
                # Up to the reply's end, and then what the template writes at the end.
                text = whole.text[exchange.shared : whole.ends[number]]
                text += whole.text[whole.ends[-1] :]
            elif number == len(messages) - 1:
                text = whole.text
            else:
                text = self.render(messages[: number + 1], asks=False).text
            if not text.startswith(exchange.prompt):
                prompt = self._prompt_in(text, exchange.prompt, messages[: number + 1])
                exchange = exchange._replace(prompt=prompt)
            exchanges.append(exchange._replace(text=text))
        return whole.text, exchanges

    def _prompt_in(self, text: str, prompt: str, messages: Sequence[Message]) -> str:
        """Returns the prompt for the last turn as the text has it, if it has one.

        The prompt may ask for no thoughts where the turn has some; or replies since the
        last question are written otherwise behind it, as without their thoughts.
        """
        *before, reply = messages
        header = prompt.removeprefix(self.render(before, asks=False).text)
        common = commonprefix([text, prompt])
        if {*THOUGHTS} & {*reply} and len(prompt) - len(common) < len(header):
            return common
        question = [turn["role"] for turn in before][::-1].index("user")
        first = self.ask(before[: len(before) - question]).text
        other = self.render([*before, {**reply, **PROBE[2]}], asks=False).text
        begin = text.rfind(header, 0, len(commonprefix([text, other])))
        if header.strip() and begin >= 0 and common.startswith(first):
            return text[: begin + len(header)]
        return prompt.removesuffix(self.opening)

    def prompt_within(
        self, asked: Rendering, messages: Sequence[Message], number: int
    ) -> Exchange:
        """Returns the prompt for a turn, without a text.

        asked: of the conversation, or of one that is longer.
        """
        if number and asked.ends:
            begin = asked.ends[number - 1]
            return Exchange(begin, asked.text[asked.ends[-1] :], "")
        return Exchange(0, self.ask(messages[:number]).text, "")

    def ask(self, messages: Sequence[Message]) -> Rendering:
        """Renders a conversation up to where the next reply begins."""
        text, ends = self.render(messages, asks=True)
        return Rendering(text + self.opening, ends)

    def added(
        self,
        messages: Sequence[Message],
        exchanges: Sequence[Exchange],
        other: str,
        example: Message | None,
    ) -> list[int]:
        """Returns the letters that the template itself begins each reply with.

        They are what all replies begin with that say something else, and calls do too.
        Blanks alone are part of the reply, as those before its first word.

        other: words that no reply has. example: a reply that is a call; None: the
          template takes none.
        """
        numbers = replies_of(messages)
        words = [messages[number]["content"].strip() for number in numbers]
        texts = [exchange.reply for exchange in exchanges]
        if all(words) and all(map(_begins_as, texts, words)):
            return [0] * len(words)
        plain = {"role": "assistant", "content": other}
        written = self._answered(plain).partition(other)[0].rstrip(" ")
        called = self._answered(example) if example else written
        is_known = all(map(_begins_as, texts, words))
        if not called.startswith(written) or (is_known and not written.strip()):
            return [0] * len(words)
        changed = [*messages]
        for number in numbers:
            kept = {n: v for n, v in messages[number].items() if n not in THOUGHTS}
            changed[number] = {**kept, "content": other}
        _, others = self.exchanges(changed)
        added = []
        for text, own_words, exchange in zip(texts, words, others, strict=True):
            common = commonprefix([text, exchange.reply]).rstrip(" ")
            is_all = _begins_as(exchange.reply[len(common) :], other)
            is_own = is_all and _begins_as(text[len(common) :], own_words)
            added.append(len(common) if common.strip() and is_own else 0)
        return added

    def _answered(self, reply: Message) -> str:
        """Returns what is written behind the prompt for a reply to a first question."""
        text = self.for_probes.render([PROBE[1], reply], asks=False).text
        return text.removeprefix(self.for_probes.ask(PROBE[1:2]).text)

    def _find_opening(self) -> str:
        """Finds what begins a reply, where the template writes no prompt for one."""
        whole = self.for_probes.render(PROBE[1:3], asks=False).text
        with contextlib.suppress(ValueError):  # for a conversation without a reply
            prompt = self.for_probes.render(PROBE[1:2], asks=True).text
            asked = self.for_probes.render(PROBE[1:2], asks=False).text
            opening = whole.removeprefix(prompt).partition("REPLY")[0].rstrip(" ")
            if prompt == asked and whole.startswith(prompt) and opening.strip():
                return opening
        return ""


def _begins_as(text: str, words: str) -> bool:
    """Returns whether a text begins with words, behind blanks."""
    return text.lstrip().startswith(words)


def _begins_with(whole: Rendering, asked: Rendering) -> bool:
    """Returns whether two renderings are one up to what stands behind the first."""
    if not whole.ends or not asked.ends:
        return False
    end = asked.ends[-1]
    return whole.ends[:-1] == asked.ends and whole.text[:end] == asked.text[:end]


def replies_of(messages: Sequence[Message]) -> list[int]:
    """Returns the numbers of the turns that are replies."""
    return [n for n, turn in enumerate(messages) if turn["role"] == "assistant"]
