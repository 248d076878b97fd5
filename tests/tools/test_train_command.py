"""The commands that the prepare tools print: they train, and what they make is used."""

import json
import re
import shlex
from pathlib import Path

import jax
import ml_collections
import pytest

import train
from configs import tiny
from data.text.corpus import prepare
from data.text.tokenizer import ByteTokenizer
from tasks import config_checks, run_config
from tasks.command_line import read_config
from tasks.task import make_run
from tasks.text import TextRun
from tests.data.test_chat import rows
from tests.data.test_tokenizer import make_hugging_face
from tests.runs import SMALL, small_config
from tests.small_agent import drawn
from tools import (
    convert_hf,
    generate,
    plan_pod,
    prepare_chat,
    prepare_lines,
    prepare_text,
)
from tools.lib.train_command import train_command
from training.weights import save_parameters

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
    config_checks.check(config, jax.device_count())
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
    assert made(printed, run).data.corpus == str(corpus)

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


LINES = "--form compact --train-tokens 20000 --validation-tokens 20000"


@pytest.mark.parametrize(
    ("program", "options", "context"),
    [
        (prepare_chat, "{source} --context-tokens 250", 250),
        (prepare_lines, LINES + " --context-tokens 400 --tokenizer {subwords}", 400),
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
    "texts, expected",
    [
        (["a" * 60000], {"validation_batches": "0"}),
        (["a" * 1700], {"validation_batches": "0", "batch_rows": "2"}),
        ([str(n) * 1000 for n in range(50)], {}),
    ],
)
def test_small_corpora_have_smaller_batches(tmp_path, texts, expected):
    for number, words in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(words)
    files = sorted(tmp_path.glob("*.txt"))
    corpus = tmp_path / "my corpus"
    prepare(files, corpus, ByteTokenizer(), validation_fraction=0.1)
    command = train_command(corpus, tiny)
    notes = command.split("train on it:")[0]
    assert ("no validation: 0 held-out rows of 512 tokens" in notes) == bool(expected)
    assert ("batches of 2 rows, not 4: there are 3" in notes) == (len(expected) == 2)
    found = dict(re.findall(r"(validation_batches|batch_rows)=(\d+)", command))
    assert found == expected
    made(command, tmp_path / "run")


def test_a_corpus_of_no_batch_says_what_is_missing(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 600)
    prepare([tmp_path / "a.txt"], tmp_path / "out", ByteTokenizer())
    said = train_command(tmp_path / "out", tiny)
    assert said.startswith("too little to train on: 1 rows of 512 tokens")
    assert "configs/tiny.py has 2; prepare more" in said
