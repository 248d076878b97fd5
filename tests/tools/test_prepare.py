"""The programs that prepare text, chats and lines: what they tell, write and refuse."""

import hashlib
import json
from pathlib import Path

import pytest

from data.chat.chat_format import FORMATS
from data.text.token_file import TokenFile, identify
from data.text.tokenizer import open_tokenizer
from data.text.tokenizer_files import read_chat_template
from tests.chat_families import QWEN
from tests.data.test_chat import rows
from tests.data.test_corpus import fill, read_both
from tests.data.test_tokenizer import make_hugging_face
from tests.processes import run_program
from tools import prepare_chat, prepare_lines, prepare_text

LINES = ["--train-tokens", "3000", "--validation-tokens", "500"]


def beginning(corpus: Path, size: int) -> bytes:
    return bytes(TokenFile.open(corpus, "train").tokens[:size].tolist())


def test_what_was_read_is_printed_and_recorded(tmp_path, capsys):
    """Files, digests, tokenizer, end token; and what is not words, but kept."""
    texts = {f"{n}.txt": f"text {n}" for n in range(5)}
    texts |= {"page.html": "<html>", "q.json": '{"a": 1}'}
    source, out = fill(tmp_path / "in", texts | {"x.bin": b"\xff"}), tmp_path / "out"
    arguments = [str(source), "--output", str(out), "--validation-fraction", "0.1"]
    assert prepare_text.main(arguments) == 0
    digest = hashlib.sha256(b"text 0").hexdigest()
    said, errors = capsys.readouterr()
    assert errors == ""
    tokens = [int(line.split()[3].replace(",", "")) for line in said.splitlines()[:2]]
    assert sum(tokens) == sum(len(text) + 1 for text in texts.values())
    for line in (
        f"files: 8, 0.0 MB: {source / '0.txt'} (sha256 {digest[:12]}), ",
        "skipped: 1, files that are not UTF-8 text; first ",
        f"written to {out}",
        "tokenizer: bytes, 257 ids; documents end with 256",
        f"markup, learned as text: 1, HTML or XML; first {source / 'page.html'}",
        f"markup, learned as text: 1, JSON; first {source / 'q.json'}",
    ):
        assert f"\n{line}" in said, said
    lines = (out / "sources.jsonl").read_text().splitlines()
    assert len(lines) == 8
    facts = {"path": str(source / "0.txt"), "bytes": 6, "sha256": digest}
    assert json.loads(lines[0]) == facts
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["sources"]["files"], meta["end_of_document"]) == (8, 256)


def test_mostly_markup_is_learned_where_that_is_asked_for(tmp_path, capsys):
    source = fill(tmp_path / "in", {"a.html": "<html>a", "b.html": "<html>b"})
    arguments = [str(source), "--output", str(tmp_path / "out")]
    assert prepare_text.main(arguments) == 1
    assert prepare_text.main([*arguments, "--keep-markup"]) == 0
    assert sorted(sum(read_both(tmp_path / "out"), [])) == ["<html>a", "<html>b"]


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
    assert "2 conversations of 6 rows" in printed.out and "supervised" in printed.out
    assert "skipped: 1, no reply within the context; first " in printed.out
    corpus = TokenFile.open(out, "train")
    assert 0 < corpus.loss_mask[:].sum() < corpus.tokens.size
    source.write_text(json.dumps(bad[1]))
    arguments[2] = str(tmp_path / "nothing")
    assert prepare_chat.main([*arguments, "--bad-rows", "skip"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    match = f"error: there is no conversation to train on in {source}: 1 files are read"
    assert error.startswith(f"{match}; skipped: 1, a turn from 'robot'")
    assert not (tmp_path / "nothing").exists()


def test_many_bad_rows_are_named_in_part_and_counted(tmp_path, capsys):
    source = tmp_path / "in\x1b[31m\udcff.jsonl"
    source.write_text('{"text": null}\n' * 30 + '{"text": "a"}\n{"text": "b"}\n')
    arguments = [str(source), "--output", str(tmp_path / "out"), "--bad-rows", "skip"]
    assert prepare_text.main(arguments) == 0
    out, err = capsys.readouterr()
    said = str(tmp_path / r"in\x1b[31m\udcff.jsonl")
    lines = err.splitlines()
    assert len(lines) == 21 and lines[19].startswith(f"skipped {said}:20: field 'tex")
    assert f"\nskipped: 30, field 'text' is NoneType, no text; first {said}:1\n" in out


@pytest.mark.quick
def test_chats_have_the_template_that_is_named(tmp_path):
    source, out = tmp_path / "in.json", tmp_path / "out"
    source.write_text(json.dumps(rows(9)))
    options = "--context-tokens", "250", "--template", "llama2", "--too-long", "split"
    program = "-m", "tools.prepare_chat"
    code, printed, errors = run_program(*program, source, "--output", out, *options)
    assert (code, errors) == (0, "")
    assert "9 conversations of 9 rows" in printed
    assert beginning(out, 16) == b"[INST] question "
    assert "chat template: llama2\n" in printed
    assert read_chat_template(out) == FORMATS["llama2"].template


def test_a_tokenizers_own_template_is_taken_and_kept(tmp_path, capsys):
    """And refuses conversations, each with its name; but another may be named."""
    make_hugging_face(tmp_path / "tokenizer.json", QWEN)
    refuses = "{{ raise_exception('3') if messages[0].content == 'question 3' }}"
    own = refuses + FORMATS["chatml"].template
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
    assert (
        printed.err == f"skipped {where}ation: 3\n"
        and "8 conversations of 9" in printed.out
    )
    assert f"chat template: of {tmp_path}\n" in printed.out
    assert f"\ntokenizer: huggingface {tmp_path}/tokenizer.json, " in printed.out
    assert read_chat_template(out) == own and identify(out)[1] == ""
    (out / "chat_template.jinja").write_text("another")
    with pytest.raises(ValueError, match="chat_template.jinja has 7 bytes, but"):
        identify(out)
    arguments[2] = str(tmp_path / "named")
    assert prepare_chat.main([*arguments, "--template", "qwen2"]) == 0
    assert "9 conversations of 9 rows" in capsys.readouterr().out
    corpus = TokenFile.open(tmp_path / "named", "train")
    tokenizer = open_tokenizer(corpus.tokenizer)
    text = "You are a helpful assistant.\nuser\nquestion"
    assert tokenizer.decode(corpus.tokens[:100]).startswith(f"system\n{text}")


def test_answers_of_lines_are_supervised_and_a_corpus_is_kept(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--form", "compact", "--context-tokens", "64", "--output", str(out)]
    assert prepare_lines.main([*arguments, *LINES]) == 0
    assert "supervised" in capsys.readouterr().out
    corpus = TokenFile.open(out, "train")
    assert 3000 <= corpus.tokens.size < 3064
    assert 0 < corpus.loss_mask[:].sum() < corpus.tokens.size / 2
    assert prepare_lines.main([*arguments, *LINES]) == 1
    assert "out already exists and is left" in capsys.readouterr().err


def test_lines_are_supervised_whole_where_all_is_asked_for(tmp_path):
    out = tmp_path / "out"
    options = ["--output", str(out), "--context-tokens", "1500", "--supervised", "all"]
    assert prepare_lines.main([*options, *LINES]) == 0
    assert TokenFile.open(out, "train").loss_mask[:].all()
    assert beginning(out, 23) == b"Below is a record of li"
