"""Chat formats: how families of models write conversations, as Jinja templates.

The templates are in data/chat/formats. Where a published one puts the system's words
before the last question (Mistral) or refuses them (Gemma 1 and 2), they stand before
the first question, so that all replies are learned with them, and no token changes when
a conversation goes on.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDER = Path(__file__).with_name("formats")


@dataclass(frozen=True)
class ChatFormat:
    """How models of a family were trained to read conversations.

    name: of the template. family: whose tokenizers have its special tokens.
    tokens: names in it that are special tokens; bos_token and eos_token are too.
    """

    name: str
    family: str
    tokens: tuple[str, ...] = ()

    @cached_property
    def template(self) -> str:
        """Jinja, as published models have theirs (see `data/chat/chat_template.py`)."""
        return (FOLDER / f"{self.name}.jinja").read_text("utf-8")


_CHATML = "<|im_start|>", "<|im_end|>"
_LLAMA3 = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
_INST = "[INST]", "[/INST]"
FORMATS = {
    written.name: written
    for written in (
        ChatFormat("vicuna", "Vicuna 1.1"),
        ChatFormat("llama2", "Llama 2"),
        ChatFormat("llama3", "Llama 3", _LLAMA3),
        ChatFormat("chatml", "Qwen", _CHATML),
        ChatFormat("qwen2", "Qwen", _CHATML),
        ChatFormat("qwen2.5", "Qwen", _CHATML),
        ChatFormat("gemma", "Gemma", ("<start_of_turn>", "<end_of_turn>")),
        ChatFormat("mistral-v1", "Mistral v1"),
        ChatFormat("mistral", "Mistral v3", _INST),
        ChatFormat(
            "mistral-v7", "Mistral v7", (*_INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
        ),
        ChatFormat("olmo2", "OLMo 2"),
    )
}
