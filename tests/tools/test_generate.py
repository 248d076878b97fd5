"""The program from a checkpoint to text, its console, and what it refuses."""

import argparse
import io
import json
import shlex
import sys
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from data.chat.chat_template import open_template
from data.text.corpus import prepare
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile
from data.text.tokens.tokenizer import ByteTokenizer
from data.text.tokens.tokenizer_files import write_tokenizer
from models.decode import NOTHING, Generator
from models.sampling import Sampling
from tasks import run_config
from tasks.generation import restored_parameters
from tasks.text import TextRun
from tests.cases import pairs
from tests.data.test_tokenizer import make_hugging_face
from tests.small import chats
from tests.small.agents import drawn
from tests.small.runs import files, small_config, small_flags
from tests.tools import hf_models
from tools import generate
from tools.generate import Chat, Writer, find_sampling, find_tokenizer, main
from training.saved.checkpoint import Checkpoints
from training.sharding.mesh import MeshShape, Partition, make_mesh
from training.step import initial_state

PROMPT, NEW, STEP = "a ring of Möwen", 12, 7


def save(config: ml_collections.ConfigDict) -> None:
    """A checkpoint of random parameters, large enough to matter."""
    run = TextRun.of(config, jax.devices())
    state = initial_state(drawn(run.model, run.partition), run.optimizer)
    directory = f"{config.workdir}/checkpoints"
    with Checkpoints(directory, keep=1, fingerprint=run.fingerprint) as checkpoints:
        checkpoints.save(STEP, state)


@pytest.fixture(scope="module")
def workdir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint; tests must not change it."""
    directory = tmp_path_factory.mktemp("run")
    save(small_config(corpus, directory))
    return directory


@pytest.fixture(scope="module")
def expected(corpus: Path, workdir: Path) -> str:
    """The likeliest text after the prompt: the whole forward for each token."""
    config = small_config(corpus, workdir, attention="vanilla")
    partition = Partition(make_mesh(MeshShape(), jax.devices()[:1]))
    parameters, _ = restored_parameters(TextRun(config, partition))
    logits = hf_models.logits(config, partition)
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode(PROMPT)
    tokens = np.zeros(80, np.int32)
    tokens[: len(prompt)] = prompt
    for place in range(len(prompt), len(prompt) + NEW):
        scores = logits(parameters, tokens)[place - 1]
        tokens[place] = scores[: tokenizer.vocab_size].argmax()
    new = tokens[len(prompt) : len(prompt) + NEW]
    assert tokenizer.end_of_document not in new
    return tokenizer.decode(new)


def arguments(corpus: Path, workdir: Path, *options: str, **overrides: Any) -> list:
    overrides = {"simulated_devices": 0, "implementation": "reference"} | overrides
    return [*small_flags(corpus, workdir, **overrides), *options]


GREEDY = "--temperature", "0", "--max-tokens", str(NEW)


@pytest.mark.quick
def test_printed_text_is_the_likeliest_of_the_checkpoints_model(
    corpus, workdir, expected, tmp_path, capsys
):
    """On fsdp 2 x ring 4; the run's workdir says all of it."""
    fields = {"simulated_devices": 0, "implementation": "reference"}
    (tmp_path / "checkpoints").symlink_to(workdir / "checkpoints")
    run_config.write(small_config(corpus, tmp_path, **fields))
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    assert main([f"--workdir={tmp_path}", *GREEDY, "--prompt-file", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{expected}\n"
    assert f"step {STEP} of {tmp_path}" in err and f"{NEW} tokens in" in err


@pytest.mark.thorough
@pytest.mark.parametrize("ring, samples", [(4, 1), (2, 3)])
def test_console_answers_every_line_on_another_mesh_and_changes_no_file(
    corpus, workdir, expected, capsys, monkeypatch, ring, samples
):
    lines = f"{PROMPT}\n\n{'x' * 100}\n{PROMPT}\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    before = files(workdir)
    mesh = {"mesh__fsdp": 4 // ring, "mesh__ring": ring, "mesh__tensor": 2}
    mesh |= {"model__vocab_size": 264}
    # Tokenizer and vocabulary are named, so that no corpus is needed.
    options = *GREEDY, "--tokenizer", "bytes", "--samples", str(samples)
    assert main(arguments(Path("nowhere"), workdir, *options, **mesh)) == 0
    out, err = capsys.readouterr()
    numbers = range(1, samples + 1)
    many = "".join(f"sample {number}:\n{expected}\n" for number in numbers)
    assert out == 2 * f"{expected if samples == 1 else many}\n"
    assert err.count("error: ") == 1 and "prompt has 100 tokens" in err
    assert err.count(f"{samples * NEW} tokens in") == 2
    assert files(workdir) == before


def test_matrices_are_restored_in_the_compute_type(corpus, workdir):
    config = small_config(corpus, workdir, compute_dtype="bfloat16")
    run = TextRun.of(config, jax.devices())
    parameters, step = restored_parameters(run)
    assert step == STEP
    layers = parameters["layers"]
    assert parameters["head"].dtype == jnp.bfloat16
    assert layers["attention"]["query"].dtype == jnp.bfloat16
    assert layers["attention_norm"]["scale"].dtype == jnp.float32
    spec = run.partition.spec((None, "embed", "heads", None), (2, 32, 4, 8))
    assert layers["attention"]["query"].sharding.spec == spec


class Stub:
    """In the place of a generator: tokens that are given, whatever the prompt."""

    slots, rows, members, samples = 40, 2, 1, 1
    vocab_size = 304

    def __init__(self, tokens: Sequence[int]):
        self.tokens, self.asked, self.prompts = tokens, [], []

    check, room = Generator.check, Generator.room

    def generate(self, parameters, prompts, max_tokens, seed, stop_tokens, held):
        self.asked.append((len(prompts), max_tokens, seed, list(stop_tokens)))
        self.prompts.append(prompts[0].tolist())
        self.held = held
        for token in self.tokens[:max_tokens]:
            yield np.array([*np.atleast_1d(token), 0])


def test_text_ends_with_the_document():
    stub = Stub([*b"caf\xc3\xa9", 256, *b"no"])
    writer = Writer(stub, ByteTokenizer(), max_tokens=None, seed=5)
    pieces = list(writer.write(None, "x" * 30, number=2))
    assert pieces == ["c", "a", "f", "", "é", ""]
    # A prompt in each row, and of tokens what the cache has room for.
    assert stub.asked == [(2, 11, 7, [256])]


def test_samples_end_each_with_its_own_document():
    """And are shown below their numbers; the fourth is of a row that the mesh wants."""
    texts = b"ab", b"", b"caf\xc3\xa9"
    steps = np.full((9, 3), NOTHING)
    for number, text in enumerate(texts):
        steps[: len(text) + 1, number] = [*text, 256]
    stub = Stub(steps)
    stub.samples = 2
    writer = Writer(stub, ByteTokenizer(), max_tokens=None, seed=5, samples=3)
    *pieces, first, second, third = writer.write(None, "x" * 22)
    assert pieces == [""] * 7 and stub.asked == [(2, 9, 5, [256])]
    assert first + second == "sample 1:\nab\nsample 2:\n\n"
    assert third == "sample 3:\ncafé\n"


def test_prompts_begin_as_the_documents_of_the_corpus(tmp_path):
    """Also where the corpus was written before its documents began with a token."""
    (tmp_path / "text.txt").write_text("the cat")
    (tmp_path / "other.txt").write_text("sat on the mat")
    config = {"add_bos_token": True, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = make_hugging_face(tmp_path / "tokenizer.json", ("<s>", "</s>"))
    tokenizer = open_tokenizer(str(path))
    for begin in ((0,), ()):
        corpus = tmp_path / f"corpus{len(begin)}"
        before = copy(tokenizer)
        before.begin_of_document = begin
        prepare([tmp_path / "text.txt", tmp_path / "other.txt"], corpus, before)
        tokens = TokenFile.open(corpus, "train").tokens[:].tolist()
        assert tokens[: len(begin)] == [*begin] and tokens.count(0) == len(begin)
        (corpus / "tokenizer_config.json").write_text(json.dumps(config))
        stub, fields = Stub([]), small_config(corpus, tmp_path)
        writer = Writer(stub, find_tokenizer(fields, None), max_tokens=9, seed=0)
        assert list(writer.write(None, "the mat")) == [""]
        assert stub.prompts[-1] == [*begin, *tokenizer.encode("the mat")]
    writer = Writer(stub, find_tokenizer(fields, str(path)), max_tokens=9, seed=0)
    assert writer.encode("the mat")[0][0] == 0  # a tokenizer that is named decides


def test_imported_weights_want_their_tokenizer_named(tmp_path):
    for vocab_size in (0, 257, 264):
        config = small_config("", tmp_path, model__vocab_size=vocab_size)
        assert find_tokenizer(config, None).name == "bytes"
    config = small_config("", tmp_path, model__vocab_size=304)
    said = "vocab_size=304 is not .*came in .--tokenizer"
    with pytest.raises(ValueError, match=said):
        find_tokenizer(config, None)
    assert find_tokenizer(config, "bytes").name == "bytes"


def test_special_tokens_that_no_text_has_may_lie_beyond_the_models_rows(tmp_path):
    """Gemma 3's tokenizer has one more id than its model of texts has rows."""
    path = make_hugging_face(tmp_path / "tokenizer.json")
    fields = json.loads(path.read_text())
    rows = max(fields["model"]["vocab"].values()) + 1
    image = fields["added_tokens"][0] | {"id": rows, "content": "<image>"}
    config = small_config("", tmp_path, model__vocab_size=rows)
    for is_special in (False, True):
        added = [*fields["added_tokens"], image | {"special": is_special}]
        path.write_text(json.dumps(fields | {"added_tokens": added}))
        if not is_special:
            with pytest.raises(ValueError, match=f"have ids up to {rows}, but"):
                find_tokenizer(config, str(path))
    tokenizer = find_tokenizer(config, str(path))
    assert tokenizer.vocab_size == rows + 1 and max(tokenizer.encode("<image>")) < rows
    tokenizer.stop_tokens = (rows,)  # documents end with it
    assert tokenizer.largest_text_id == rows
    stub = Stub([])
    stub.vocab_size = 116
    writer = Writer(stub, ByteTokenizer(), max_tokens=2, seed=0)
    with pytest.raises(ValueError, match="from 0 to 115, which the model has, got 116"):
        writer.encode("t")
    assert writer.encode("s")[0].tolist() == [115]


def test_a_chat_goes_on_with_what_was_said(tmp_path):
    """Prompts are what training has before the replies; replies end with their turn."""
    specials = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<stop>"
    path = make_hugging_face(tmp_path / "tokenizer.json", specials)
    config = {"eos_token_id": [0, 3]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(str(path))
    template = open_template("chatml", tokenizer)
    said = [("Hi?", "Hello."), ("Wie heißt 猫?", "Katze"), ("Bye", "See you")]
    for stop_token in (0, 2, 3):
        stub = Stub([])
        stub.slots = 500
        writer = Writer(stub, tokenizer, 20, 1, Chat(template, "Be brief."))
        for number, (user, reply) in enumerate(said):
            stub.tokens = [*tokenizer.encode(f" {reply} "), stop_token, 50, 50]
            text = "".join(writer.write(None, f" {user}\n", number))
            assert text == f" {reply} "
            talk = chats.talk("Be brief.", *said[: number + 1])
            (trained,) = template.documents(talk)
            answer = len(tokenizer.encode(reply)) + 2  # <|im_end|> and a newline
            assert stub.prompts[-1] == trained.tokens[:-answer].tolist()
        assert stub.asked[-1] == (2, 20, 3, [0, 2, 3])
        assert stub.held is writer.chat.held
        assert writer.chat and writer.chat.messages == talk[1:]


def test_lines_of_a_chat_are_turns_until_an_empty_one(
    corpus, workdir, capsys, monkeypatch
):
    lines = f"Hi?\nBye\n\nHi?\n{'x' * 100}\nBye\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    stub, template = Stub(b"Ho!"), open_template("vicuna", ByteTokenizer())
    stub.slots = 80
    writer = Writer(stub, ByteTokenizer(), 3, 0, Chat(template, "S"))
    monkeypatch.setattr(generate, "prepare", lambda *_: writer)
    assert main(arguments(corpus, workdir)) == 0
    out, err = capsys.readouterr()
    assert out == "Ho!\n" * 4
    first, second = stub.prompts[:2]
    assert stub.prompts == [first, second, first, second] and len(second) > len(first)
    assert err.count("error: ") == 1
    assert "error: the conversation has 1" in err and "in the cache of 80: begin" in err
    # Each draws other random numbers.
    assert [seed for _, _, seed, _ in stub.asked] == [0, 1, 2, 4]


def test_texts_are_drawn_as_the_model_says_or_the_options(tmp_path):
    tokenizer = open_tokenizer(str(make_hugging_face(tmp_path / "tokenizer.json")))
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    none = argparse.Namespace(temperature=None, top_k=None, top_p=None)
    some = argparse.Namespace(temperature=0.0, top_k=None, top_p=1.0)
    (tmp_path / "copy").mkdir()  # as in a corpus
    copied = f"{tmp_path}/copy/{write_tokenizer(tmp_path / 'copy', tokenizer)}"
    for options, drawn_by, expected in (
        (none, tokenizer, (0.6, 20, 0.95)),
        (none, open_tokenizer(copied), (0.6, 20, 0.95)),
        (some, tokenizer, (0.0, 20, 1.0)),
        (none, ByteTokenizer(), (1.0, 0, 1.0)),
    ):
        found = find_sampling(options, drawn_by)
        assert found == Sampling(*expected, allowed_tokens=drawn_by.vocab_size)
    (tmp_path / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(ValueError, match="generation_config.json has top_p 'high'"):
        find_sampling(none, tokenizer)


@pytest.mark.parametrize(("case", "said"), pairs("generate.txt"))
def test_what_is_wrong_is_said_in_short(
    corpus, workdir, tmp_path, case, said, capsys, monkeypatch
):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("not refused before the model was run")

    monkeypatch.setattr(Generator, "_go_on", refuse)
    tokenizer = make_hugging_face(tmp_path / "tokenizer.json")
    options = shlex.split(case.format(tokenizer=tokenizer))
    assert main(arguments(corpus, workdir, *options)) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ")
    assert all(part in err for part in said.split(" | ")), err
