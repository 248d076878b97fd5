import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import models

from data.text.tokens.published import open_tokenizer
from data.text.tokens.tokenizer import ByteTokenizer, TextStream, Tokenizer, begun
from tests.cases import table
from tests.small.chats import Family

TEXT = "The cat sat on the mat. Die Möwe sprach: 猫!\r\n\tdef f(x): return x\n"


def make_hugging_face(path, specials=("<pad>", "<|endoftext|>")):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    of_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = of_bytes
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=list(specials),
        initial_alphabet=of_bytes.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def make_sentence_piece(path, eos_id=2, **symbols):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "the dog sat on the log"]),
        model_prefix=str(path.with_suffix("")),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        # As LLaMA's.
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        eos_id=eos_id,
        hard_vocab_limit=False,
        minloglevel=2,
        **symbols,
    )
    return path


each_kind = pytest.mark.parametrize("kind", ["bytes", "huggingface", "sentencepiece"])


SPECIAL = {
    "bytes": {"<end>": 256},
    "huggingface": {"<pad>": 0, "<|endoftext|>": 1},
    "sentencepiece": {"<s>": 1, "</s>": 2},
}


@each_kind
def test_text_comes_back_from_its_ids_alone_and_among_others(specs, kind):
    """Also beyond the length at which the file cuts and pads texts."""
    tokenizer = open_tokenizer(specs[kind])
    texts = ["the cat sat on the log: Möwe 猫", "", "sat on the mat " * 20, "猫"]
    for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist()
        assert ids.dtype == np.int32 and ids.shape == (ids.size,)
        assert tokenizer.decode(np.append(ids, tokenizer.end_of_document)) == text
    assert tokenizer.name == kind and tokenizer.encode("").size == 0
    last = tokenizer.vocab_size - 1
    for wrong in (500, -1, 1 << 40):
        with pytest.raises(ValueError, match=rf"from 0 to {last}, got .*{wrong}"):
            tokenizer.decode([5, wrong])


@each_kind
def test_no_text_is_encoded_to_special_tokens(specs, kind):
    tokenizer = open_tokenizer(specs[kind])
    assert tokenizer.special == SPECIAL[kind]
    text = f"the mat {' '.join(tokenizer.special)} after it"
    ids = tokenizer.encode(text)
    assert not np.isin(ids, [*tokenizer.special.values()]).any()
    assert tokenizer.decode(ids) == text
    assert tokenizer.special[tokenizer.names["eos_token"]] == tokenizer.end_of_document
    named = {} if kind == "bytes" else tokenizer.special
    assert {name: tokenizer.token_id(name) for name in named} == named
    assert tokenizer.token_id("no such") is None


def test_texts_behind_a_special_token_have_no_space_of_the_first_word(tmp_path):
    """They are encoded as the library does where the special token is there."""
    path = make_sentence_piece(tmp_path / "tokenizer.model")
    model = open_tokenizer(str(path))
    for spaces in ("first", "always", ""):
        family = Family(("<s>", "</s>"), "<s>", "</s>", spaces=spaces)
        one = open_tokenizer(str(family.save(tmp_path, ["the cat sat"] * 3)))
        whole = tokenizers.Tokenizer.from_file(str(one.path))
        for text in ("cat", " cat", "the cat"):
            (behind,) = one.encode_all([text], is_behind=True)
            assert [0, *behind] == whole.encode(f"<s>{text}").ids
            (behind,) = model.encode_all([text], is_behind=True)
            assert behind.tolist() == model.encode(text.strip()).tolist()
        (behind,) = one.encode_all(["cat"], is_behind=True)
        differ = behind.tolist() != one.encode("cat").tolist()
        assert differ == (spaces == "first")
        (special,) = one.encode_all(["<s>"], is_behind=True)
        assert 0 not in special


def beside(directory, **files):
    """Writes files beside a tokenizer, and returns the tokenizer of the directory."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / f"{name}.json").write_text(text)
    return open_tokenizer(str(directory))


def with_own_begin(path, *names):
    """Lets the file itself put these tokens before a text, and the first behind it."""
    made = tokenizers.Tokenizer.from_file(str(path))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*names, "$A", names[0]],
        special_tokens=[(name, made.token_to_id(name)) for name in names],
    )
    made.save(str(path))


def test_texts_begin_with_what_the_file_puts_there_unless_others_say(tmp_path):
    path = tmp_path / "tokenizer.json"
    make_hugging_face(path, ("<|endoftext|>", "<s>", "<go>"))

    def found(**config):
        tokenizer = beside(tmp_path, tokenizer_config=config)
        return tokenizer.begin_of_document, tokenizer.names.get("bos_token")

    assert found() == ((), "<s>")
    assert found(add_bos_token=True) == ((), "<s>")
    assert found(bos_token=None) == ((), None)
    assert found(bos_token="<go>") == ((), "<go>")
    assert found(bos_token={"content": "<go>"}, add_bos_token=True) == ((2,), "<go>")
    with_own_begin(path, "<go>")
    assert found() == ((2,), "<go>")
    assert found(add_bos_token=False) == ((), "<s>")
    assert found(bos_token="<s>") == ((2,), "<s>")
    assert found(bos_token="<s>", add_bos_token=True) == ((1,), "<s>")
    with_own_begin(path, "<go>", "<s>")
    assert found() == ((2, 1), "<go>")
    tokenizer = beside(tmp_path)
    text = tokenizer.encode("the cat")
    assert begun(tokenizer, text).tolist() == [2, 1, *text]
    assert begun(tokenizer, text).dtype == np.int32


def test_sentence_piece_begins_and_ends_with_its_own_tokens_unless_others_say(tmp_path):
    make_sentence_piece(tmp_path / "tokenizer.model", control_symbols=["<end_of_turn>"])
    assert beside(tmp_path).begin_of_document == (1,)
    assert beside(tmp_path).names == {"bos_token": "<s>", "eos_token": "</s>"}
    config = {"add_bos_token": False, "bos_token": "<s>"}
    assert beside(tmp_path, tokenizer_config=config).begin_of_document == ()
    tokenizer = beside(tmp_path, generation_config={"eos_token_id": [1, 3]})
    assert tokenizer.token_id("<end_of_turn>") == 3
    assert (tokenizer.stop_tokens, tokenizer.end_of_document) == ((2, 1, 3), 2)
    make_sentence_piece(tmp_path / "tokenizer.model", bos_id=-1)
    assert beside(tmp_path, tokenizer_config={}).begin_of_document == ()


SPECIALS = "</s>", "<|endoftext|>", "<|im_end|>", "<eos>"


def test_the_end_of_a_document_is_what_the_files_say_or_else_a_known_name(tmp_path):
    make_hugging_face(tmp_path / "tokenizer.json", SPECIALS)
    assert beside(tmp_path).stop_tokens == (3,)  # Gemma has both <eos> and </s>
    config = {"eos_token_id": 1, "hidden_size": 64}
    assert beside(tmp_path, config=config).stop_tokens == (1,)
    tokenizer = beside(tmp_path, generation_config={"eos_token_id": [0, 1]})
    assert (tokenizer.stop_tokens, tokenizer.end_of_document) == ((0, 1), 0)
    eos = {"content": "<|im_end|>", "lstrip": False}
    tokenizer = beside(tmp_path, tokenizer_config={"eos_token": eos})
    assert (tokenizer.stop_tokens, tokenizer.end_of_document) == ((2, 0, 1), 2)
    tokenizer = beside(tmp_path, tokenizer_config={"eos_token": "<eos>"})
    assert (tokenizer.stop_tokens, tokenizer.end_of_document) == ((3, 0, 1), 3)
    nothing = {"eos_token": "", "eos_token_id": None}
    files = "tokenizer_config", "generation_config", "config"
    assert beside(tmp_path, **dict.fromkeys(files, nothing)).stop_tokens == (3,)


@pytest.mark.parametrize("name, content, complaint", table("data.txt", "tokenizer"))
def test_files_that_name_no_token_are_refused(tmp_path, name, content, complaint):
    make_hugging_face(tmp_path / "tokenizer.json")
    assert open_tokenizer(str(tmp_path)).vocab_size == 299
    with pytest.raises(ValueError, match=complaint) as caught:
        beside(tmp_path, **{name: content})
    assert str(caught.value).isprintable()


def test_a_directory_has_a_tokenizer_or_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither tokenizer.json nor tokenizer"):
        open_tokenizer(str(tmp_path))
    for make, name in (make_sentence_piece, "model"), (make_hugging_face, "json"):
        path = tmp_path / f"tokenizer.{name}"
        with pytest.raises(FileNotFoundError, match=f"{path} does not exist"):
            open_tokenizer(str(path))
        path.write_text("not a tokenizer")
        with pytest.raises(ValueError, match=f"{path} must be a"):
            open_tokenizer(str(path))
        make(path)
        assert open_tokenizer(str(tmp_path)).path == path


def test_a_tokenizer_needs_an_end_of_any_name(tmp_path):
    path = make_sentence_piece(tmp_path / "tokenizer.model", eos_id=-1)
    with pytest.raises(ValueError, match=r"tokenizer\.model has no end-of-sentence"):
        open_tokenizer(str(path))
    make_hugging_face(tmp_path / "tokenizer.json", ("<pad>", "<stop>"))
    with pytest.raises(ValueError, match="json has no token to end .*name another in"):
        open_tokenizer(str(tmp_path))
    tokenizer = beside(tmp_path, tokenizer_config={"eos_token": "<stop>"})
    assert (tokenizer.stop_tokens, tokenizer.end_of_document) == ((1,), 1)


def changed(path, change):
    """A tokenizer of all bytes, but for what `change` does to its file."""
    found = json.loads(make_hugging_face(path).read_text())
    change(found)
    path.write_text(json.dumps(found))
    return open_tokenizer(str(path))


def test_patterns_beyond_the_library_s_limits_are_refused_in_a_line(tmp_path):
    slow = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+b"), "isolated")
    parts = {"pre_tokenizer": json.loads(slow.__getstate__())}
    tokenizer = changed(tmp_path / "a.json", lambda file: file.update(parts))
    with pytest.raises(
        ValueError, match="cannot encode a text .*retry-limit.*simplify its patterns"
    ):
        tokenizer.encode("a" * 40)


def test_texts_are_encoded_alike_whatever_dropout_the_file_has(tmp_path):
    expected = changed(tmp_path / "a.json", lambda file: None).encode(TEXT)
    dropout = changed(tmp_path / "b.json", lambda file: file["model"].update(dropout=1))
    np.testing.assert_array_equal(dropout.encode(TEXT), expected)


NAMES = vars(models) | {"ENDED": {"</s>": 0, "cat": 1}}


@pytest.mark.parametrize(
    "model, complaint", table("data.txt", "model", **NAMES), ids=str
)
def test_tokenizers_that_cannot_encode_every_text_are_refused(
    tmp_path, model, complaint
):
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(path))
    with pytest.raises(ValueError, match=f"tokenizer.json {complaint}") as caught:
        open_tokenizer(str(path))
    assert str(caught.value).isprintable()


def test_a_vocabulary_must_have_all_bytes_of_texts_and_no_larger_ids(tmp_path):
    def without(file, *letters):
        assert file["model"]["unk_token"] is None
        file["model"]["merges"] = []
        for letter in letters:
            del file["model"]["vocab"][letter]

    # 0xF5 is in no UTF-8, and 0xE2 in much of it.
    tokenizer = changed(tmp_path / "a.json", lambda file: without(file, "õ"))
    assert tokenizer.encode("猫").size == 3
    with pytest.raises(ValueError, match="no token for letters"):
        changed(tmp_path / "a.json", lambda file: without(file, "õ", "â"))
    with pytest.raises(ValueError, match="has the id 2147483648, and ids are below"):
        changed(tmp_path / "a.json", lambda f: f["model"]["vocab"].update(new=1 << 31))


STREAMED = "the cat sat: Möwe 猫 🙂🙂 e\u0301, on the log"
BYTES = ByteTokenizer()


def pieces(tokenizer: Tokenizer, prompt: np.ndarray, tokens: np.ndarray) -> list[str]:
    stream = TextStream(tokenizer, prompt)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@each_kind
@pytest.mark.parametrize("prompt_length", [1, 4, 15])
def test_pieces_join_to_the_text_after_the_prompt(specs, kind, prompt_length):
    tokenizer = open_tokenizer(specs[kind])
    prompt = tokenizer.encode(STREAMED[:prompt_length])
    # A space that belongs to the next word is not part of the prompt's last one.
    whole = np.concatenate([prompt, tokenizer.encode(STREAMED)])
    got = pieces(tokenizer, prompt, whole[len(prompt) :])
    assert tokenizer.decode(prompt) + "".join(got) == tokenizer.decode(whole)
    assert got[-1] == "" and "\ufffd" not in "".join(got)
    assert sum(map(bool, got)) > 10


def test_what_is_no_letter_comes_out_once_that_is_known():
    tokens = np.array([0xE7, 0x8C, 0x61, 0xFF, 0xFF, 0x62, 0xC3])
    got = pieces(BYTES, BYTES.encode("x"), tokens)
    assert got == ["", "", "\ufffda", "", "", "\ufffd\ufffdb", "", "\ufffd"]
    # What ends a document is no text.
    tokens = np.append(BYTES.encode("end"), BYTES.end_of_document)
    assert "".join(pieces(BYTES, BYTES.encode("x"), tokens)) == "end"
