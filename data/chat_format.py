"""Chat formats: how families of models write conversations, as records.

Where a published template puts the system's words before the last question (Mistral) or
refuses them (Gemma 1 and 2), they stand before the first question, so that all replies
are learned with them, and no token changes when a conversation goes on.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ChatFormat:
    """How models of a family were trained to read conversations.

    name: of the template. family: whose tokenizers have its special tokens.
    question: an exchange up to where the reply begins, around the {user}'s words.
    opening: the first one, where a {system} has words too.
    reply: around the assistant's words. after: text behind the token that ends them.
    tokens: names that are special tokens in the texts above, and text elsewhere.
    begin, end: special tokens before a conversation ("": none) and after a reply; None:
      the tokenizer's own of a text, of which it must have the second.
    begins_each: whether `begin` stands before every exchange.
    system: words of the system where a conversation has none; None: no words.
    """

    name: str
    family: str
    question: str
    opening: str
    reply: str = "{reply}"
    after: str = ""
    tokens: tuple[str, ...] = ()
    begin: str | None = None
    end: str | None = None
    begins_each: bool = False
    system: str | None = None


_VICUNA_QUESTION = "USER: {user} ASSISTANT:"
VICUNA = ChatFormat(
    name="vicuna",
    family="Vicuna 1.1",
    question=_VICUNA_QUESTION,
    opening="{system} " + _VICUNA_QUESTION,
    reply=" {reply}",
    system="A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's "
    "questions.",
)
LLAMA2 = ChatFormat(
    name="llama2",
    family="Llama 2",
    question="[INST] {user} [/INST]",
    opening="[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{user} [/INST]",
    reply=" {reply} ",
    begins_each=True,
)
_LLAMA3_QUESTION = (
    "<|start_header_id|>user<|end_header_id|>\n\n{user}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
LLAMA3 = ChatFormat(
    name="llama3",
    family="Llama 3",
    question=_LLAMA3_QUESTION,
    opening="<|start_header_id|>system<|end_header_id|>\n\n{system}<|eot_id|>"
    + _LLAMA3_QUESTION,
    tokens=("<|start_header_id|>", "<|end_header_id|>"),
    begin="<|begin_of_text|>",
    end="<|eot_id|>",
)
_CHATML_QUESTION = "<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
CHATML = ChatFormat(
    name="chatml",
    family="Qwen",
    question=_CHATML_QUESTION,
    opening="<|im_start|>system\n{system}<|im_end|>\n" + _CHATML_QUESTION,
    after="\n",
    tokens=("<|im_start|>",),
    begin="",
    end="<|im_end|>",
)
QWEN2 = replace(CHATML, name="qwen2", system="You are a helpful assistant.")
QWEN2_5 = replace(
    CHATML,
    name="qwen2.5",
    system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
)
_GEMMA_TURNS = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
GEMMA = ChatFormat(
    name="gemma",
    family="Gemma",
    question=_GEMMA_TURNS.format("{user}"),
    opening=_GEMMA_TURNS.format("{system}\n\n{user}"),
    after="\n",
    tokens=("<start_of_turn>",),
    begin="<bos>",
    end="<end_of_turn>",
)
# No spaces: a tokenizer that puts one before every text does so here too.
MISTRAL = ChatFormat(
    name="mistral",
    family="Mistral v3",
    question="[INST]{user}[/INST]",
    opening="[INST]{system}\n\n{user}[/INST]",
    tokens=("[INST]", "[/INST]"),
    begin="<s>",
    end="</s>",
)
FORMATS = {
    written.name: written
    for written in (VICUNA, LLAMA2, LLAMA3, CHATML, QWEN2, QWEN2_5, GEMMA, MISTRAL)
}
