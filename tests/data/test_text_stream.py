"""Text that comes token by token is the text of all tokens."""

import numpy as np
import pytest

from data.text.text_stream import TextStream
from data.text.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer
from tests.data.test_tokenizer import each_kind

TEXT = "the cat sat: Möwe 猫 🙂🙂 e\u0301, on the log"
BYTES = ByteTokenizer()


def pieces(tokenizer: Tokenizer, prompt: np.ndarray, tokens: np.ndarray) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@each_kind
@pytest.mark.parametrize("prompt_length", [1, 4, 15])
def test_pieces_join_to_the_text_after_the_prompt(specs, kind, prompt_length):
    tokenizer = open_tokenizer(specs[kind])
    prompt = tokenizer.encode(TEXT[:prompt_length])
    # A space that belongs to the next word is not part of the prompt's last one.
    whole = np.concatenate([prompt, tokenizer.encode(TEXT)])
    got = pieces(tokenizer, prompt, whole[len(prompt) :])
    assert tokenizer.decode(prompt) + "".join(got) == tokenizer.decode(whole)
    assert got[-1] == "" and "\ufffd" not in "".join(got)
    assert sum(map(bool, got)) > 10


def test_what_is_no_letter_comes_out_once_that_is_known():
    tokens = np.array([0xE7, 0x8C, 0x61, 0xFF, 0xFF, 0x62, 0xC3])
    got = pieces(BYTES, BYTES.encode("x"), tokens)
    assert got == ["", "", "\ufffda", "", "", "\ufffd\ufffdb", "", "\ufffd"]


def test_what_ends_a_document_is_no_text():
    tokens = np.append(BYTES.encode("end"), BYTES.end_of_document)
    assert "".join(pieces(BYTES, BYTES.encode("x"), tokens)) == "end"
