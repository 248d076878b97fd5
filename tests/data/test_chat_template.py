"""Templates, written out: the texts that published models were trained on."""

from types import SimpleNamespace

import pytest

from data.chat_template import Llama2, Llama3, Vicuna
from data.tokenizer import ByteTokenizer

SPECIAL = {
    "<s>": 1,
    "<|begin_of_text|>": 10,
    "<|start_header_id|>": 11,
    "<|end_header_id|>": 12,
    "<|eot_id|>": 13,
}
NAMES = {token: name for name, token in SPECIAL.items()} | {2: "</s>"}


def tokenizer(*names):
    return SimpleNamespace(
        name="some",
        end_of_document=2,
        token_id={name: SPECIAL[name] for name in names}.get,
    )


def written(template, system, *exchanges):
    """The text of a conversation, and in it what is supervised, each in brackets."""
    first, *others = exchanges
    pieces = template.opening(system, *first)
    for exchange in others:
        pieces += template.following(*exchange)
    parts = [
        (piece.text if piece.token is None else NAMES[piece.token], piece.is_supervised)
        for piece in pieces
    ]
    text = "".join(part for part, _ in parts)
    return text, [part for part, is_supervised in parts if is_supervised]


EXCHANGES = [("Hi?", "Hello."), ("Bye", "See you")]


def test_vicuna():
    text, supervised = written(Vicuna(tokenizer("<s>")), None, *EXCHANGES)
    assert text == (
        "<s>A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's "
        "questions. USER: Hi? ASSISTANT: Hello.</s>USER: Bye ASSISTANT: See you</s>"
    )
    assert supervised == [" Hello.", "</s>", " See you", "</s>"]
    text, _ = written(Vicuna(tokenizer()), "Be brief.", EXCHANGES[0])
    assert text == "Be brief. USER: Hi? ASSISTANT: Hello.</s>"


def test_llama2():
    text, supervised = written(Llama2(tokenizer("<s>")), "Be brief.", *EXCHANGES)
    assert text == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi? [/INST] Hello. </s>"
        "<s>[INST] Bye [/INST] See you </s>"
    )
    assert supervised == [" Hello. ", "</s>", " See you ", "</s>"]
    text, _ = written(Llama2(tokenizer("<s>")), None, EXCHANGES[0])
    assert text == "<s>[INST] Hi? [/INST] Hello. </s>"


def test_llama3():
    template = Llama3(tokenizer(*(set(SPECIAL) - {"<s>"})))
    text, supervised = written(template, "Be brief.", *EXCHANGES)

    def turn(role, words):
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n{words}<|eot_id|>"

    assert text == "<|begin_of_text|>" + turn("system", "Be brief.") + "".join(
        turn("user", user) + turn("assistant", reply) for user, reply in EXCHANGES
    )
    assert supervised == ["Hello.", "<|eot_id|>", "See you", "<|eot_id|>"]


def test_a_tokenizer_without_the_templates_tokens_is_refused():
    with pytest.raises(ValueError, match=r"bytes tokenizer has no token <\|start_head"):
        Llama3(ByteTokenizer())
    with pytest.raises(ValueError, match=r"no token <\|eot_id\|>, which the template"):
        Llama3(tokenizer(*(set(SPECIAL) - {"<|eot_id|>"})))
