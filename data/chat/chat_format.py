"""Chat formats: how families of models write conversations, as Jinja templates.

Where a published template puts the system's words before the last question (Mistral) or
refuses them (Gemma 1 and 2), they stand before the first question, so that all replies
are learned with them, and no token changes when a conversation goes on.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFormat:
    """How models of a family were trained to read conversations.

    name: of the template. family: whose tokenizers have its special tokens.
    template: as published models have theirs, see `data/chat/chat_template.py`.
    tokens: names in it that are special tokens; bos_token and eos_token are too.
    """

    name: str
    family: str
    template: str
    tokens: tuple[str, ...] = ()


def _turns(turn: str, reply: str, *, first: str = "{{ bos_token }}") -> str:
    """Returns the template of a text for each turn `m`, and what a reply begins with.

    first: before all turns.
    """
    asks = "{% if add_generation_prompt %}" + reply + "{% endif %}"
    return first + "{% for m in messages %}" + turn + "{% endfor %}" + asks


def _chatml(system: str = "") -> str:
    """Returns the template; system: its words where a conversation has none."""
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    first = turn.format("system", system)
    first = "{% if messages[0].role != 'system' %}" + first + "{% endif %}"
    return _turns(
        turn.format("{{ m.role }}", "{{ m.content }}"),
        "<|im_start|>assistant\n",
        first=first if system else "",
    )


# The words of the system are `system`, and other turns `messages`.
_SYSTEM_APART = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
)
# Before a user's turn.
_SYSTEM_FIRST = "{{ system + '\n\n' if loop.first and system is defined }}"
_CHATML_TOKENS = "<|im_start|>", "<|im_end|>"
_INST_TOKENS = "[INST]", "[/INST]"


def _instructions(question: str, reply: str, first: str) -> str:
    """Returns a template of turns that alternate, the system's words in the first."""
    turn = "{% if m.role == 'user' %}" + question + "{% else %}" + reply + "{% endif %}"
    return _turns(turn, "", first=_SYSTEM_APART + first)


VICUNA = ChatFormat(
    "vicuna",
    "Vicuna 1.1",
    _instructions(
        "USER: {{ m.content }} ASSISTANT:",
        " {{ m.content }}{{ eos_token }}",
        "{{ bos_token }}{{ system if system is defined else "
        "'A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user\\'s "
        "questions.' }} ",
    ),
)
LLAMA2 = ChatFormat(
    "llama2",
    "Llama 2",
    _instructions(
        "{{ bos_token }}[INST] {% if loop.first and system is defined %}<<SYS>>\n"
        "{{ system }}\n<</SYS>>\n\n{{ m.content.rstrip() }}{% else %}"
        "{{ m.content.strip() }}{% endif %} [/INST]",
        " {{ m.content.strip() }} {{ eos_token }}",
        "",
    ),
)
LLAMA3 = ChatFormat(
    "llama3",
    "Llama 3",
    _turns(
        "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
CHATML = ChatFormat("chatml", "Qwen", _chatml(), _CHATML_TOKENS)
_ASSISTANT = "You are a helpful assistant."
QWEN2 = ChatFormat("qwen2", "Qwen", _chatml(_ASSISTANT), _CHATML_TOKENS)
QWEN2_5 = ChatFormat(
    "qwen2.5",
    "Qwen",
    _chatml(f"You are Qwen, created by Alibaba Cloud. {_ASSISTANT}"),
    _CHATML_TOKENS,
)
GEMMA = ChatFormat(
    "gemma",
    "Gemma",
    _turns(
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        + _SYSTEM_FIRST
        + "{{ m.content | trim }}<end_of_turn>\n",
        "<start_of_turn>model\n",
        first=_SYSTEM_APART + "{{ bos_token }}",
    ),
    ("<start_of_turn>", "<end_of_turn>"),
)
MISTRAL_V1 = ChatFormat(
    "mistral-v1",
    "Mistral v1",
    _instructions(
        " [INST] " + _SYSTEM_FIRST + "{{ m.content }} [/INST]",
        " {{ m.content }}{{ eos_token }}",
        "{{ bos_token }}",
    ),
)
# No spaces: a tokenizer that puts one before every text does so here too.
MISTRAL = ChatFormat(
    "mistral",
    "Mistral v3",
    _instructions(
        "[INST]" + _SYSTEM_FIRST + "{{ m.content }}[/INST]",
        "{{ m.content }}{{ eos_token }}",
        "{{ bos_token }}",
    ),
    _INST_TOKENS,
)
_SYSTEM_PROMPT = "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"
MISTRAL_V7 = ChatFormat(
    "mistral-v7",
    "Mistral v7",
    _instructions(
        "[INST] {{ m.content }}[/INST]",
        " {{ m.content }}{{ eos_token }}",
        "{{ bos_token }}{% if system is defined %}[SYSTEM_PROMPT] {{ system }}"
        "[/SYSTEM_PROMPT]{% endif %}",
    ),
    _INST_TOKENS + _SYSTEM_PROMPT,
)
OLMO2 = ChatFormat(
    "olmo2",
    "OLMo 2",
    _turns(
        "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}"
        "{% endif %}{{ '' if m.role == 'assistant' and loop.last else '\n' }}",
        "<|assistant|>\n",
    ),
)
FORMATS = {
    written.name: written
    for written in (
        *(VICUNA, LLAMA2, LLAMA3, CHATML, QWEN2, QWEN2_5, GEMMA),
        *(MISTRAL_V1, MISTRAL, MISTRAL_V7, OLMO2),
    )
}
