"""Tokenizers with the special tokens of published chat models, made on the spot.

Used by the tests, and by what wrote their fixture with transformers, so both have the
same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from data.chat.turns import Message


def talk(system: str | None, *exchanges: tuple[str, str]) -> list[Message]:
    """Returns the turns of a conversation, of questions and replies."""
    turns = [] if system is None else [{"role": "system", "content": system}]
    for user, reply in exchanges:
        turns.append({"role": "user", "content": user})
        turns.append({"role": "assistant", "content": reply})
    return turns


QWEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
GEMMA = "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"
INST = "[INST]", "[/INST]"
PHI = "<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"

WORDS = r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
"""What tokens do not cross, much as in LLaMA 3's and Qwen's tokenizers."""


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer has.

    special: its special tokens. bos, eos: those of a text.
    spaces: how texts are split: "" as LLaMA 3's and Qwen's; else words have their space
      before them, and where a text has none it is put there: before the "first" word,
      or before every text between special tokens ("always").
    strips: whether special tokens take the blanks behind them.
    reply_end: ends a reply; "": eos does.
    """

    special: Sequence[str]
    bos: str | None
    eos: str
    spaces: str = ""
    strips: bool = False
    reply_end: str = ""

    @property
    def end(self) -> str:
        return self.reply_end or self.eos

    def make(self, texts: Sequence[str]) -> Tokenizer:
        """Trains the tokenizer."""
        tokenizer = Tokenizer(BPE(unk_token="<unk>" if self.spaces else None))
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = pre_tokenizers.Split(Regex(WORDS), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = [] if self.spaces else level.alphabet()
        if self.spaces:
            scheme = {"prepend_scheme": self.spaces}
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**scheme)
            tokenizer.decoder = decoders.Metaspace(**scheme)
        trainer = BpeTrainer(
            vocab_size=700 if self.spaces else 400,
            show_progress=False,
            special_tokens=[*self.special, *["<unk>"] * bool(self.spaces)],
            initial_alphabet=sorted(alphabet),
        )
        tokenizer.train_from_iterator(texts, trainer)
        if self.strips:
            tokenizer.add_special_tokens(
                [AddedToken(t, special=True, rstrip=True) for t in self.special]
            )
        return tokenizer

    def save(self, directory: Path, texts: Sequence[str]) -> Path:
        """Writes the tokenizer's file into a directory."""
        path = directory / "tokenizer.json"
        self.make(texts).save(str(path))
        return path


_LLAMA2 = Family(("<s>", "</s>"), "<s>", "</s>", spaces="always")
_LLAMA3 = Family(LLAMA3, "<|begin_of_text|>", "<|eot_id|>")
_QWEN = Family(QWEN, None, "<|im_end|>")
_GEMMA = Family(GEMMA, "<bos>", "<eos>")
_MISTRAL = ("<s>", "</s>", *INST)
_MISTRAL_V7 = (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
FAMILIES = {
    "vicuna": _LLAMA2,
    "llama2": _LLAMA2,
    "llama3": _LLAMA3,
    "chatml": _QWEN,
    "qwen2": _QWEN,
    "qwen2.5": _QWEN,
    "gemma": _GEMMA,
    "gemma3": _GEMMA,
    "mistral-v1": replace(_LLAMA2, spaces="first"),
    "mistral": Family(_MISTRAL, "<s>", "</s>"),
    "mistral-v7": Family(_MISTRAL_V7, "<s>", "</s>", spaces="first"),
    "olmo2": Family(("<|endoftext|>", "<|pad|>"), "<|endoftext|>", "<|endoftext|>"),
}
_TOOLS = (
    "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
)
_MISTRAL_TOOLS = Family((*_MISTRAL, *_TOOLS.split()), "<s>", "</s>")
_PHI_TOOLS = "<|tool|> <|/tool|> <|tool_call|> <|/tool_call|> <|tool_response|>"
_CALLS = "calls▁begin calls▁end call▁begin call▁end sep output▁begin output▁end"
_DEEPSEEK = ["begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"]
_DEEPSEEK += [f"tool▁{name}" for name in _CALLS.split()]
_DEEPSEEK = [f"<｜{name}｜>" for name in _DEEPSEEK]
TOOL_FAMILIES = {
    "llama3.1": _LLAMA3,
    **dict.fromkeys(("qwen2.5-tools", "qwen3", "qwen3-2507"), _QWEN),
    **dict.fromkeys(("mistral-nemo", "mistral-7b-v0.3"), _MISTRAL_TOOLS),
    "phi4-mini": Family(
        (*PHI, *_PHI_TOOLS.split()),
        "<|endoftext|>",
        "<|endoftext|>",
        reply_end="<|end|>",
    ),
    "deepseek": Family(_DEEPSEEK, *_DEEPSEEK[:2]),
}
TOOL_CHATS = Path(__file__).parents[1] / "cases" / "tool_chats.jsonl"
