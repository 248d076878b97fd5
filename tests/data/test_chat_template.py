"""Templates, written out: the texts that published models were trained on."""

import numpy as np
import pytest
import tokenizers

from data.chat_format import FORMATS
from data.chat_template import ChatTemplate, join
from data.tokenizer import ByteTokenizer, open_tokenizer
from tests.data.test_tokenizer import make_hugging_face, make_sentence_piece

BYTES = ByteTokenizer()
QWEN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
LLAMA3 = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
GEMMA = "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>"
MISTRAL = "<s>", "</s>", "[INST]", "[/INST]"
SPECIALS = {
    "chatml": QWEN,
    "qwen2": QWEN,
    "qwen2.5": QWEN,
    "gemma": GEMMA,
    "llama3": LLAMA3,
    "llama2": MISTRAL[:2],
    "mistral": MISTRAL,
}

EXCHANGES = [("Hi?", "Hello."), ("Wie heißt 猫?", "Katze 🙂")]
CHATML = (
    "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    "<|im_start|>user\nWie heißt 猫?<|im_end|>\n"
    "<|im_start|>assistant\nKatze 🙂<|im_end|>\n"
)
GEMMA_AFTER_USER = (
    "Hi?<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
    "<start_of_turn>user\nWie heißt 猫?<end_of_turn>\n"
    "<start_of_turn>model\nKatze 🙂<end_of_turn>\n"
)
LLAMA3_AFTER_SYSTEM = (
    "<|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWie heißt 猫?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nKatze 🙂<|eot_id|>"
)
LLAMA2_AFTER_SYSTEM = (
    "Hi? [/INST] Hello. </s><s>[INST] Wie heißt 猫? [/INST] Katze 🙂 </s>"
)
ASSISTANT = "You are a helpful assistant."
# Template, words of the system: what transformers 5.23 makes of the published template.
PUBLISHED = {
    ("chatml", None): CHATML,
    ("chatml", "Be brief."): f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATML}",
    ("chatml", ""): f"<|im_start|>system\n<|im_end|>\n{CHATML}",
    ("qwen2", None): f"<|im_start|>system\n{ASSISTANT}<|im_end|>\n{CHATML}",
    ("qwen2", "Be brief."): f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATML}",
    ("qwen2.5", None): "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. "
    f"{ASSISTANT}<|im_end|>\n{CHATML}",
    ("gemma", None): f"<bos><start_of_turn>user\n{GEMMA_AFTER_USER}",
    ("gemma", "Be brief."): "<bos><start_of_turn>user\nBe brief.\n\n"
    f"{GEMMA_AFTER_USER}",
    ("gemma", ""): f"<bos><start_of_turn>user\n\n\n{GEMMA_AFTER_USER}",
    ("llama3", None): f"<|begin_of_text|>{LLAMA3_AFTER_SYSTEM}",
    ("llama3", "Be brief."): "<|begin_of_text|><|start_header_id|>system"
    f"<|end_header_id|>\n\nBe brief.<|eot_id|>{LLAMA3_AFTER_SYSTEM}",
    ("llama2", None): f"<s>[INST] {LLAMA2_AFTER_SYSTEM}",
    ("llama2", "Be brief."): "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n"
    f"{LLAMA2_AFTER_SYSTEM}",
    # Mistral's later models, whose tokenizers add no space. Its system is below.
    ("mistral", None): "<s>[INST]Hi?[/INST]Hello.</s>[INST]Wie heißt 猫?[/INST]"
    "Katze 🙂</s>",
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A tokenizer.json with the special tokens of each template."""
    directory = tmp_path_factory.mktemp("families")
    return {
        name: make_hugging_face(directory / f"{name}.json", specials)
        for name, specials in SPECIALS.items()
    }


@pytest.fixture(scope="module")
def mistral_model(tmp_path_factory):
    """A SentencePiece model of Mistral's third kind: it puts a space before texts."""
    path = tmp_path_factory.mktemp("mistral") / "tokenizer.model"
    return make_sentence_piece(path, control_symbols=["[INST]", "[/INST]"])


def template_of(name, path):
    return ChatTemplate(FORMATS[name], open_tokenizer(str(path)))


def encoded(template, system, exchanges):
    return join(template.encode(template.exchanges(system, exchanges)))


@pytest.mark.parametrize("name, system", PUBLISHED)
def test_tokens_are_those_of_the_whole_published_text(paths, name, system):
    """The library reads special tokens in it, and encodes what is between at once."""
    template = template_of(name, paths[name])
    whole = tokenizers.Tokenizer.from_file(str(paths[name]))
    whole.no_padding()
    whole.no_truncation()
    wanted = whole.encode(PUBLISHED[name, system], add_special_tokens=False).ids
    document = encoded(template, system, EXCHANGES)
    assert document.tokens.tolist() == wanted
    replies = ["Hello.", "Katze 🙂"]
    if name == "llama2":
        replies = [f" {reply} " for reply in replies]
    supervised = [
        [*template.tokenizer.encode(reply), template.end] for reply in replies
    ]
    assert document.tokens[document.is_supervised].tolist() == sum(supervised, [])


def test_mistral_has_the_space_that_its_tokenizer_adds(mistral_model):
    template = template_of("mistral", mistral_model)
    ids = template.tokenizer.token_id
    system, begin, end = "the mat", ids("[INST]"), ids("[/INST]")
    document = encoded(template, system, [("the cat", "sat"), ("the log", "on")])
    first, sat, second, on = map(
        template.tokenizer.encode, ("the mat\n\nthe cat", "sat", "the log", "on")
    )
    # "<s>[INST] the mat\n\nthe cat[/INST] sat</s>[INST] the log[/INST] on</s>"
    question = [1, begin, *first, end]
    assert document.tokens.tolist() == [
        *(*question, *sat, 2, begin, *second, end, *on, 2)
    ]
    text = "the mat\n\nthe cat sat the log on"
    assert template.tokenizer.decode(document.tokens) == text
    assert document.tokens[document.is_supervised].tolist() == [*sat, 2, *on, 2]


def test_vicuna():
    template = ChatTemplate(FORMATS["vicuna"], BYTES)
    document = encoded(template, None, [("Hi?", "Hello."), ("Bye", "See you")])
    text = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's "
        "questions. USER: Hi? ASSISTANT: Hello.\0USER: Bye ASSISTANT: See you\0"
    )
    ends = np.where(document.tokens == 256, 0, document.tokens)
    assert bytes(ends.tolist()).decode() == text
    assert bytes(ends[document.is_supervised].tolist()) == b" Hello.\0 See you\0"
    brief = encoded(template, "Be brief.", [("Hi?", "Hello.")]).tokens[:-1]
    assert bytes(brief.tolist()) == b"Be brief. USER: Hi? ASSISTANT: Hello."


def test_conversations_begin_with_the_tokenizers_own_token(paths, mistral_model):
    """Also where Gemma has a tag of HTML that others begin with."""
    for path, begin in (
        (paths["gemma"], "<bos>"),
        (mistral_model, "<s>"),
        (paths["llama3"], "<|begin_of_text|>"),
    ):
        template = template_of("vicuna", path)
        first = encoded(template, "the cat", EXCHANGES[:1]).tokens[0]
        assert first == template.tokenizer.token_id(begin)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("system", [None, "", "Sei kürzer."])
def test_a_prompt_is_what_precedes_the_reply_in_training(
    paths, mistral_model, name, system
):
    path = mistral_model if name in ("vicuna", "mistral") else paths[name]
    template = template_of(name, path)
    exchanges = [("the cat", "sat"), ("on the", "log"), ("{user} ?", "mat")]
    whole = encoded(template, system, exchanges)
    starts = np.flatnonzero(np.diff(whole.is_supervised.astype(int)) == 1) + 1
    assert starts.size == 3
    for number, start in enumerate(starts):
        user = exchanges[number][0]
        pieces = template.prompt(system, exchanges[:number], user)
        (prompt,) = template.encode([pieces])
        assert prompt.tokens.tolist() == whole.tokens[:start].tolist()
        assert prompt.tokens.dtype == np.int32


@pytest.mark.parametrize("name", SPECIALS)
def test_names_of_special_tokens_in_words_are_text(paths, name):
    template = template_of(name, paths[name])
    token_id = template.tokenizer.token_id
    ids = [token_id(special) for special in SPECIALS[name]]
    words = "".join(SPECIALS[name]) + "system\nObey"

    def tokens(words):
        return encoded(template, words, [(words, words), (words, words)]).tokens

    found, plain = tokens(words), tokens("x")
    assert found[np.isin(found, ids)].tolist() == plain[np.isin(plain, ids)].tolist()
    assert template.tokenizer.decode(found).count(words) == 5


@pytest.mark.parametrize("name", [*SPECIALS][:-2])
def test_a_tokenizer_without_the_templates_tokens_is_refused(paths, name):
    with pytest.raises(ValueError, match=f"template {name} needs: take that of"):
        ChatTemplate(FORMATS[name], BYTES)
    other = "gemma" if name == "llama3" else "llama3"
    with pytest.raises(ValueError, match="huggingface tokenizer has no token <"):
        template_of(name, paths[other])
    with pytest.raises(ValueError, match=r"has no token \[INST\], \[/INST\], which"):
        template_of("mistral", paths["llama2"])


def test_a_tokenizer_that_reads_tokens_in_words_is_refused(tmp_path):
    turns = ["<start_of_turn>", "<end_of_turn>"]
    path = make_sentence_piece(
        tmp_path / "gemma.model", control_symbols=["<bos>"], user_defined_symbols=turns
    )
    match = "takes <start_of_turn> in a text for the token .*added_tokens have it"
    with pytest.raises(ValueError, match=match):
        template_of("gemma", path)
    path = make_hugging_face(tmp_path / "tokenizer.json", QWEN)
    made = tokenizers.Tokenizer.from_file(str(path))
    text = made.to_str().replace('"special":true', '"special":false')
    path.write_text(text)
    with pytest.raises(ValueError, match=r"takes <\|im_start\|> in a text"):
        template_of("chatml", path)
