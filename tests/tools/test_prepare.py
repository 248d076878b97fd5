"""The programs that prepare text, chats and lines, and the commands that they print."""

import hashlib
import json
import re
import shlex
from pathlib import Path

import jax
import ml_collections
import pytest

import train
from configs import tiny
from data.chat.chat_template import format_source
from data.text.corpus import prepare
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile, identify
from data.text.tokens.tokenizer import ByteTokenizer
from data.text.tokens.tokenizer_files import read_chat_template
from tasks import run_config
from tasks.command_line import read_config
from tasks.task import check, make_run
from tasks.text import TextRun
from tests.cases import table
from tests.data.test_chat import rows
from tests.data.test_corpus import fill, read_both
from tests.data.test_tokenizer import make_hugging_face
from tests.small.agents import drawn
from tests.small.chats import QWEN
from tests.small.runs import SMALL, small_config
from tools import (
    convert_hf,
    generate,
    plan_pod,
    prepare_chat,
    prepare_lines,
    prepare_text,
)
from tools.lib.prepare import train_command
from training.saved.weights import save_parameters

LINES = ["--train-tokens", "3000", "--validation-tokens", "500"]


def beginning(corpus: Path, size: int) -> bytes:
    return bytes(TokenFile.open(corpus, "train").tokens[:size].tolist())


def test_what_was_read_is_printed_and_recorded(tmp_path, capsys):
    """Files, digests, tokenizer; rows without text; rows without words, which stay."""
    texts = {f"{n}.txt": f"text {n}" for n in range(5)}
    texts |= {"page.html": "<html>", "q.json": '{"a": 1}', "a.csv": "a,a\n1,2\n"}
    others = {"rows.csv": "text,a\nrow,2\n", ".hidden/secret.txt": "hidden"}
    others |= {"x.jsonl": '{"text": ""}\n\n{"text": "line"}\n', "empty.txt": ""}
    others |= {"latin.txt": "Möwe".encode("latin-1"), "nul.bin": b"ab\0cd"}
    source, out = fill(tmp_path / "in", texts | others), tmp_path / "out"
    arguments = [str(source), "--output", str(out), "--validation-fraction", "0.1"]
    assert prepare_text.main(arguments) == 0
    digest = hashlib.sha256(b"text 0").hexdigest()
    said = capsys.readouterr().out
    tokens = [int(line.split()[3].replace(",", "")) for line in said.splitlines()[:2]]
    kept = sorted([*texts.values(), "row", "line"])
    assert sorted(sum(read_both(out), [])) == kept
    assert sum(tokens) == sum(len(text) + 1 for text in kept)
    for line in (
        f"skipped: 2, files that are not UTF-8 text; first {source / 'latin.txt'}",
        f"skipped: 2, empty documents; first {source / 'empty.txt'}",
        f"markup, learned as text: 1, HTML or XML; first {source / 'page.html'}",
        f"markup, learned as text: 1, JSON; first {source / 'q.json'}",
    ):
        assert f"\n{line}" in said, said
    lines = (out / "sources.jsonl").read_text().splitlines()
    facts = {"path": str(source / "0.txt"), "bytes": 6, "sha256": digest}
    assert len(lines) == 13 and json.loads(lines[0]) == facts
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["sources"]["files"], meta["end_of_document"]) == (13, 256)


def test_bad_chats_end_the_program_or_are_told_and_skipped(tmp_path, capsys):
    source, out, bad = tmp_path / "in.jsonl", tmp_path / "out", rows(6)
    bad[1]["conversations"][0]["from"] = "robot"
    bad[2]["conversations"] = []
    bad[4]["conversations"][1]["value"] = 7
    bad[5]["conversations"][0]["value"] = "long " * 80
    source.write_text("".join(json.dumps(row) + "\n" for row in bad))
    arguments = [str(source), "--output", str(out), "--context-tokens", "300"]
    assert prepare_chat.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {source}:2 (id r1), turn 1: a turn from 'robot'")
    assert not out.exists()
    assert prepare_chat.main([*arguments, "--bad-rows", "skip"]) == 0
    printed = capsys.readouterr()
    where = ("2 (id r1), turn 1", "3 (id r2)", "5 (id r4), turn 2", "6 (id r5)")
    for line, place in zip(printed.err.splitlines(), where, strict=True):
        assert line.startswith(f"skipped {source}:{place}: ")
    assert "2 conversations of 6 rows, 10 turns" in printed.out
    assert "skipped: 1, no reply within the context; first " in printed.out
    source.write_text(json.dumps(bad[1]))
    arguments[2] = str(tmp_path / "nothing")
    assert prepare_chat.main([*arguments, "--bad-rows", "skip"]) == 1
    assert "error: there is no conversation to train on in" in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()


def test_conversations_are_shown_with_what_is_learned(tmp_path, capsys):
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    lines = [{"q": f"Q{n}", "completion": "A\x1b" * 900 * n} for n in range(3)]
    source.write_text("\n".join(map(json.dumps, lines)))
    arguments = [str(source), "--output", str(out), "--context-tokens", "3000"]
    arguments += ["--fields", "prompt=q", "--bad-rows", "skip"]
    assert prepare_chat.main([*arguments, "--show", "2"]) == 0
    shown = capsys.readouterr().out.split("\n\n")
    assert (
        r"USER: Q1 ASSISTANT:⟦ A\x1bA" in shown[0] and "[… 806 letters …]" in shown[0]
    )
    assert shown[0].endswith(r"A\x1b<end>⟧") and shown[1].startswith("conversation 2:")
    arguments[2] = str(tmp_path / "none")
    assert prepare_chat.main([*arguments, "--show", "0"]) == 0
    assert "⟧" not in capsys.readouterr().out
    for wrong, near in ("promt=q", "is read: prompt"), ("x", "is read: id, messages, "):
        assert prepare_chat.main([*arguments, "--fields", wrong]) != 0
        assert near in capsys.readouterr().err


def test_a_tokenizers_own_template_is_taken_and_kept(tmp_path, capsys):
    """And refuses conversations, each with its name; but another may be named."""
    make_hugging_face(tmp_path / "tokenizer.json", QWEN)
    refuses = "{{ raise_exception('3') if messages[0].content == 'question 3' }}"
    own = refuses + format_source("chatml")
    (tmp_path / "chat_template.jinja").write_text(own)
    source, out = tmp_path / "in.json", tmp_path / "out"
    source.write_text(json.dumps(rows(9)))
    arguments = [str(source), "--output", str(out), "--context-tokens", "250"]
    arguments += ["--tokenizer", str(tmp_path)]
    where = f"{source}[3] (id r3): the chat template of {tmp_path} refuses the convers"
    assert prepare_chat.main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"error: {where}ation: 3: mend or remov")
    assert not out.exists()
    assert prepare_chat.main([*arguments, "--bad-rows", "skip"]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"skipped {where}ation: 3\n"
    assert "8 conversations of 9" in printed.out
    assert read_chat_template(out) == own and identify(out)[1] == ""
    (out / "chat_template.jinja").write_text("another")
    with pytest.raises(ValueError, match="chat_template.jinja has 7 bytes, but"):
        identify(out)
    arguments[2] = str(tmp_path / "named")
    assert prepare_chat.main([*arguments, "--template", "qwen2"]) == 0
    corpus = TokenFile.open(tmp_path / "named", "train")
    tokenizer = open_tokenizer(corpus.tokenizer)
    text = "You are a helpful assistant.\nuser\nquestion"
    assert tokenizer.decode(corpus.tokens[:100]).startswith(f"system\n{text}")


def test_answers_of_lines_are_supervised_and_a_corpus_is_kept(tmp_path, capsys):
    out = str(tmp_path / "out")
    arguments = ["--form", "compact", "--context-tokens", "64", "--output", out, *LINES]
    assert prepare_lines.main(arguments) == 0
    corpus = TokenFile.open(tmp_path / "out", "train")
    assert 3000 <= corpus.tokens.size < 3064
    assert 0 < corpus.loss_mask[:].sum() < corpus.tokens.size / 2
    assert prepare_lines.main(arguments) == 1
    assert "out already exists and is left" in capsys.readouterr().err
    published = ["--output", str(tmp_path / "LRT"), "--context-tokens", "1500", *LINES]
    assert prepare_lines.main(published) == 0
    assert beginning(tmp_path / "LRT", 23) == b"Below is a record of li"


# The commands that are printed: they train, and what they make is used.

LETTERS = "Möwen sah ich über dem Meer, und keine sprach. " * 700


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(train.__file__).parent)


def flags_of(printed: str) -> list[str]:
    """Arguments of the printed `python train.py`."""
    command = printed.split("train on it:\n")[1].replace("\\\n", "")
    program, file, *flags = shlex.split(command)
    assert Path(program).name.startswith("python") and file == "train.py"
    return flags


@pytest.fixture
def subwords(tmp_path: Path) -> str:
    return str(make_hugging_face(tmp_path / "tokenizer.json"))  # 300 ids or fewer


def made(printed: str, workdir: Path) -> ml_collections.ConfigDict:
    """The config of a printed command, whose run would go as far as to compile."""
    config = read_config([*flags_of(printed), f"--config.workdir={workdir}"])
    check(config, jax.device_count())
    make_run(config, jax.devices()).open_data()
    return config


def save(config: ml_collections.ConfigDict, workdir: Path) -> None:
    """Saves random weights as those of a run."""
    run = TextRun.of(config, jax.devices())
    save_parameters(workdir, drawn(run.model, run.partition), run.fingerprint)
    run_config.write(config)


@pytest.mark.thorough
def test_own_text_of_own_tokenizer_trains_generates_plans_and_exports(
    tmp_path, capsys, subwords
):
    source, corpus, run = tmp_path / "book.txt", tmp_path / "book", tmp_path / "run"
    source.write_text(LETTERS)
    arguments = [str(source), "--output", str(corpus), "--tokenizer", subwords]
    assert prepare_text.main(arguments) == 0
    printed = capsys.readouterr().out
    more = {name: size for name, size in SMALL.items() if name.startswith("model.")}
    more |= {"workdir": run, "simulated_devices": 0, "implementation": "reference"}
    flags = [*flags_of(printed), *(f"--config.{n}={v}" for n, v in more.items())]
    config = read_config(flags)
    save(config, run)
    vocab_size = json.loads((corpus / "meta.json").read_text())["vocab_size"]
    assert vocab_size not in (264, 257)

    options, rest = generate._options(flags)
    writer = generate.prepare(TextRun.of(config, jax.devices()), options)
    assert writer.tokenizer.vocab_size == vocab_size and rest == flags
    assert convert_hf.main(["export", str(run), str(tmp_path / "hf")]) == 0
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["vocab_size"] == -(-vocab_size // 8) * 8
    assert plan_pod.main([*flags, "--topology=v4:2x2x1", "--suggest"]) == 0

    wrong = "vocab_size=264 must be .* set config.model.vocab_"
    with pytest.raises(ValueError, match=wrong):
        train.train(read_config([*flags, "--config.model.vocab_size=264"]))


SHORT = "--form compact --train-tokens 20000 --validation-tokens 20000"


@pytest.mark.parametrize(
    ("program", "options", "context"),
    [
        (prepare_chat, "{source} --context-tokens 250", 250),
        (prepare_lines, SHORT + " --context-tokens 400 --tokenizer {subwords}", 400),
    ],
)
def test_documents_train_whole_in_rows_that_the_ring_need_not_divide(
    program, options, context, tmp_path, capsys, subwords
):
    source = tmp_path / "in.json"
    source.write_text(json.dumps(rows(90)))
    given = options.format(source=source, subwords=subwords).split()
    assert program.main([*given, "--output", str(tmp_path / "corpus")]) == 0
    config = made(capsys.readouterr().out, tmp_path)
    assert (config.data.rows, config.data.context_tokens) == ("whole", context)
    assert config.train.validation_batches and not config.model.vocab_size


@pytest.mark.parametrize("program", [prepare_chat, prepare_text])
def test_imported_weights_are_fine_tuned_on_what_was_prepared(
    tmp_path, capsys, program, subwords
):
    weights = tmp_path / "weights"
    save(small_config("", weights, model__vocab_size=304), weights)
    source, corpus = tmp_path / "in.jsonl", tmp_path / "corpus"
    talks = [row | {"text": "Wo? " * 300} for row in rows(90)]
    source.write_text("\n".join(map(json.dumps, talks)))
    is_chat = program is prepare_chat
    options = ["--output", str(corpus), *["--context-tokens", "256"] * is_chat]
    assert program.main([str(source), *options, "--weights", str(weights)]) == 1
    assert "the directory that they came in (--tokenizer)" in capsys.readouterr().err
    options += ["--tokenizer", subwords]
    assert program.main([str(source), *options, "--weights", "nowhere"]) == 1
    assert "nowhere holds no imported weights" in capsys.readouterr().err
    assert not corpus.exists()
    assert program.main([str(source), *options, "--weights", str(weights)]) == 0
    found = made(capsys.readouterr().out, tmp_path / "run")
    assert found.lora.rank and found.init_from == str(weights)
    assert (found.model.vocab_size, found.model.num_layers) == (304, 2)
    rows_of = ("whole", 256) if is_chat else ("packed", 8192)
    assert (found.data.rows, found.data.context_tokens) == rows_of


@pytest.mark.parametrize(
    "texts, expected, share", table("data.txt", "few", str=str, range=range)
)
def test_small_corpora_have_smaller_batches(tmp_path, texts, expected, share):
    for number, words in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(words)
    files, corpus = sorted(tmp_path.glob("*.txt")), tmp_path / "my corpus"
    summary = prepare(files, corpus, ByteTokenizer(), validation_fraction=0.1)
    command = train_command(corpus, tiny, holdout=summary.holdout)
    if expected is None:
        assert command.startswith("too little to train on: 1 rows of 512 tokens")
        return
    found = dict(re.findall(r"(validation_batches|batch_rows)=(\d+)", command))
    assert found == expected
    made(command, tmp_path / "run")
    advised = [float(x) for x in re.findall(r"--validation-fraction (\S+)", command)]
    assert advised == [share] * (share is not None)
    if share:
        again = tmp_path / "again"
        prepare(files, again, ByteTokenizer(), validation_fraction=share)
        assert "no validation" not in train_command(again, tiny)
