"""What a chat template writes of a conversation besides its words, found by examples.

Templates leave out what they do not know, without a word: tools, thoughts, calls. And
they take the arguments of calls as objects, or as JSON in a text, or both.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from data.chat.template_text import PROBE, TOOL, TOOLS, TemplateText
from data.chat.turns import THOUGHTS, Message, parsed

WORD = "PROBE"
ASKED = PROBE[1]
REPLIED = PROBE[2]
# An id of nine letters, as Mistral's templates ask for.
ID = "abcdefghi"


def call(arguments: Any) -> Message:
    """Returns a turn with a call."""
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": ID, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(role: str = "tool") -> Message:
    """Returns a turn with what a call gave."""
    return {"role": role, "content": "RESULT", "tool_call_id": ID, "name": "f"}


class WrittenParts:
    """What a template writes; it is asked for each part once, where one is met."""

    def __init__(self, text: TemplateText):
        self._text = text.given(TOOLS)
        self._name = text.name

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """Returns a conversation with calls and thoughts as the template takes them.

        Raises:
          ValueError: the template does not write calls, or takes what tools say for
            words of the assistant; or arguments are no object.
        """
        if any(message["role"] == "tool" for message in messages) and not self._results:
            raise ValueError(self._refusal("turns of tools"))
        return [self._fit(message) for message in messages]

    def _fit(self, message: Message) -> Message:
        fitted = dict(message)
        thoughts = [message[name] for name in THOUGHTS if name in message]
        if thoughts and self.thoughts:
            fitted.setdefault(self.thoughts, thoughts[0])
        if "tool_calls" in message:
            if not self.arguments:
                raise ValueError(self._refusal("tool_calls"))
            fitted["tool_calls"] = [*map(self._fit_call, message["tool_calls"])]
        return fitted

    def _fit_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        given = function.get("arguments", {})
        if isinstance(given, self.arguments):
            return call
        value = parsed(given, "a call with arguments") if given else {}
        if not isinstance(value, dict):
            raise ValueError("a call with arguments that are no object")
        if dict not in self.arguments:
            value = json.dumps(value, ensure_ascii=False)
        function = {**function, "arguments": value}
        return {**call, "function": function} if "function" in call else function

    def _refusal(self, what: str) -> str:
        return (
            f"the chat template {self._name} does not write {what}: choose another, as "
            "the own one of a tokenizer whose model calls tools (--template own)"
        )

    def unwritten(self, messages: Sequence[Message], tools: Any) -> list[str]:
        """Returns names of what the conversation has and the template leaves out."""
        has_thoughts = any({*THOUGHTS} & {*message} for message in messages)
        left_out = []
        if messages[0]["role"] == "system" and not self.writes_system:
            left_out.append("the system's words")
        if tools and not self.writes_tools:
            left_out.append("the tools")
        if has_thoughts and not self.thoughts:
            left_out.append("thoughts of replies")
        return left_out

    @cached_property
    def writes_system(self) -> bool:
        """Whether words of the system are written, or refused."""
        return WORD in (
            self._render({"role": "system", "content": WORD}, ASKED) or WORD
        )

    @cached_property
    def writes_tools(self) -> bool:
        """Whether tools are written, or refused."""
        tools = [{"type": "function", "function": {**TOOL, "name": WORD}}]
        return WORD in (self._render(ASKED, tools=tools) or WORD)

    @cached_property
    def thoughts(self) -> str | None:
        """Name of the field whose thoughts are written; None: none is."""
        for name in THOUGHTS:
            if WORD in (self._render(ASKED, {**REPLIED, name: WORD}) or ""):
                return name
        return None

    @cached_property
    def arguments(self) -> tuple[type, ...]:
        """Types of arguments that are written as they should be; (): none is."""
        given = {WORD: 1}
        as_object = self._render(ASKED, call(given)) or ""
        as_text = self._render(ASKED, call(json.dumps(given))) or ""
        types: tuple[type, ...] = ()
        # Python's own quotes are no JSON.
        if WORD in as_object and f"'{WORD}'" not in as_object:
            types += (dict,)
        # Nor is a text of JSON in quotes an object.
        if json.dumps(given) in as_text:
            types += (str,)
        return types

    @cached_property
    def example(self) -> Message | None:
        """A turn with a call, as the template takes it; None: it takes none."""
        given = {WORD: 1}
        if not self.arguments:
            return None
        return call(given if dict in self.arguments else json.dumps(given))

    @cached_property
    def _results(self) -> bool:
        """Whether turns of tools are written, and not as words of the assistant."""
        before = ASKED, self.example or REPLIED
        text = self._render(*before, result())
        if text is None:
            return True  # and it will refuse the conversation
        return "RESULT" in text and text != self._render(*before, result("assistant"))

    def _render(self, *messages: Message, tools: Any = TOOLS) -> str | None:
        """Renders a conversation; None: the template refuses it."""
        try:
            return self._text.given(tools).render(messages, asks=False).text
        except ValueError:
            return None
