"""RULER, lines and losses by position, on models of known behaviour."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from data.chat.chat_template import open_template
from data.text.corpus import prepare
from data.text.tokens.published import open_tokenizer
from data.text.tokens.tokenizer import ByteTokenizer, begun
from models.decode import NOTHING
from tasks import run_config, text
from tasks.generation import restored_parameters
from tasks.text import TextRun
from tests.data.test_tokenizer import make_hugging_face
from tests.small.models import partition_of
from tests.small.runs import small_config, small_flags
from tests.support.hard_rows import token_losses
from tests.tools.test_generate import save
from tools import evaluate
from tools.lib.evaluation import loss
from tools.lib.evaluation.ruler import Generated, prediction_file
from tools.lib.retrieval.prompts import Encoder, Prompt
from training.sharding.mesh import MeshShape

BYTES = ByteTokenizer()
SIZES = {"simulated_devices": 0, "implementation": "reference"}
WHOLE = SIZES | {"data__rows": "whole"}
RULER = "ruler --tasks niah_single_1,fwe --lengths 1000,1200 --samples 3"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint of random parameters, which answer all kinds of things."""
    directory = tmp_path_factory.mktemp("run")
    save(small_config("", directory, **WHOLE))
    return directory


@pytest.fixture
def ask(workdir):
    """Evaluates the run's model; returns the exit code."""

    def run(subcommand: str, *options: object) -> int:
        flags = [*small_flags("", workdir, **WHOLE), "--tokenizer=bytes"]
        return evaluate.main([*subcommand.split(), *flags, *map(str, options)])

    return run


def predictions(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*/pred/*.jsonl"))
    return {str(file.relative_to(folder)): file.read_text() for file in files}


def read_answers(folder: Path) -> dict[str, str]:
    """Returns the answer of each text."""
    return {
        prompt["input"] + prompt["answer_prefix"]: ", ".join(prompt["outputs"])
        for path in folder.glob("**/data/*/validation.jsonl")
        for prompt in map(json.loads, path.read_text().splitlines())
    }


@pytest.fixture
def prompts(ask, tmp_path) -> Path:
    assert ask(RULER, "--save-prompts", tmp_path / "prompts") == 0
    return tmp_path / "prompts"


@pytest.fixture
def asked(prompts, monkeypatch) -> list[str]:
    """Texts that a model is asked to go on with, which knows the shorter answers."""
    answers, texts = read_answers(prompts / "1000"), []

    def look_up(_, given):
        new = [BYTES.decode(prompt) for prompt in given]
        texts.extend(new)
        return [answers.get(text, "").upper() for text in new]

    monkeypatch.setattr(Generated, "__call__", look_up)
    return texts


@pytest.fixture
def evaluated(ask, asked, tmp_path) -> Path:
    """The folder of an evaluation."""
    assert ask(RULER, "--output", tmp_path / "ruler") == 0
    return tmp_path / "ruler"


@pytest.mark.quick
def test_right_answers_score_100_in_the_table_and_in_the_rows(
    capsys, asked, prompts, evaluated, workdir
):
    assert set(asked) == read_answers(prompts).keys()
    shown = capsys.readouterr().out
    assert "average                100.0*       0.0\n" in shown
    assert (
        "tasks: 2 (RULER's table has 13); average 50.0, weighted to long 33.3" in shown
    )
    rows = json.loads((evaluated / "scores.json").read_text())["rows"]
    found = [(row["length"], row["score"], row["nulls"]) for row in rows]
    assert found == 2 * [(1000, 100, 0)] + 2 * [(1200, 0, 3)]
    for row in rows:
        assert (row["run"], row["step"], row["samples"]) == (str(workdir), 7, 3)
        # On a ring of 4: keys and values of 2 layers, 2 heads, 8 numbers; the index.
        expected = row["length"] // 4 * (2 * 2 * 2 * 8 * 4 + 4)
        assert row["cache_bytes"] == pytest.approx(expected, abs=64)
    first = json.loads(predictions(evaluated)["1000/pred/fwe.jsonl"].splitlines()[0])
    # What NVIDIA's eval/evaluate.py reads.
    assert {"input", "pred", "outputs", "others", "index"} <= first.keys()


@pytest.mark.quick
def test_an_evaluation_goes_on_where_it_was_killed(asked, ask, evaluated, bars):
    before = predictions(evaluated)
    prediction_file(evaluated, 1200, "fwe").unlink()
    path = prediction_file(evaluated, 1200, "niah_single_1")
    path.write_bytes(path.read_bytes()[:-20])  # in the middle of the third row
    asked.clear()
    assert ask(RULER, "--output", evaluated) == 0
    assert len(asked) == 1 + 3
    (bar,) = bars
    assert bar.n == bar.total == 2 * 3 * (1000 + 1200)
    assert bar.total - bar.initial == 4 * 1200
    assert predictions(evaluated) == before


@pytest.mark.quick
def test_predictions_of_something_else_are_left_alone(ask, evaluated, tmp_path, capsys):
    before = predictions(evaluated)
    capsys.readouterr()
    assert ask(RULER, "--output", evaluated, "--form", "LRT") == 1
    assert "has predictions with files [], and these" in capsys.readouterr().err
    assert predictions(evaluated) == before
    assert ask(RULER, "--output", tmp_path) == 1
    assert "is not empty, and has no run.json" in capsys.readouterr().err


def test_the_prefix_begins_the_answer_of_a_base_model_and_of_a_chat():
    draft = Prompt("Where?", " It is at", ("home",))
    base, template = Encoder(BYTES, None), open_template("vicuna", BYTES)
    wanted = begun(BYTES, BYTES.encode("Where? It is at"))
    assert base(draft).tolist() == wanted.tolist() and base.count(draft) == len(wanted)
    chat = Encoder(BYTES, template)
    asked = template.prompt([{"role": "user", "content": "Where?"}])
    assert chat(draft).tolist() == [*asked, *BYTES.encode(" It is at")]
    assert chat.count(draft) == len(chat(draft))


def test_batches_are_filled_up_and_texts_end_where_nothing_follows():
    def generate(_, prompts, *given):
        assert prompts == ["a", "b", "a"] and given == (4, 0, [7])
        yield from np.array([[*b"xyx"], [*b"2", NOTHING, *b"2"]])

    generator: Any = SimpleNamespace(rows=3, generate=generate)
    texts = Generated(generator, None, BYTES, 4, [7])(["a", "b"])
    assert texts == ["x2", "y"]


@pytest.mark.quick
def test_lines_have_scores_by_length_and_depth(ask, tmp_path, monkeypatch):
    """Answers are right but at the last depth; a text goes on behind the line's end."""
    lines = "ruler --tasks lines --form compact --lengths 62,64 --samples 7"
    assert ask(lines, "--save-prompts", tmp_path / "prompts") == 0
    known = read_answers(tmp_path / "prompts")
    last = [number for number in range(7) if number % 5 == 4]

    def look_up(_, given):
        texts = [known[BYTES.decode(prompt)] + "line 5: 123" for prompt in given]
        return ["99" if n in last else text for n, text in enumerate(texts)]

    monkeypatch.setattr(Generated, "__call__", look_up)
    assert ask(lines, "--rows", "8", "--output", tmp_path / "out") == 0
    rows = json.loads((tmp_path / "out" / "scores.json").read_text())["rows"]
    depths = [[depth, 100.0 * (depth < 1)] for depth in (0, 0.25, 0.5, 0.75, 1)]
    assert [(row["length"], row["by_depth"]) for row in rows] == [
        (62, depths),
        (64, depths),
    ]
    assert [row["score"] for row in rows] == 2 * [85.71]
    shown = (tmp_path / "out" / "depths.txt").read_text().splitlines()
    assert [line.split() for line in (shown[0], *shown[-2:])] == [
        ["task", "depth", "62", "64"],
        ["lines", "75%", "100.0", "100.0"],
        ["lines", "100%", "0.0", "0.0"],
    ]
    # Lengths are those of the right answers, and longer ones have room.
    for name, written in predictions(tmp_path / "out").items():
        sizes = [json.loads(line)["length"] for line in written.splitlines()]
        assert int(name[:2]) - 5 < min(sizes) <= max(sizes) <= int(name[:2])
    assert all(row["cache_bytes"] >= 80 // 4 * (2 * 2 * 2 * 8 * 4) for row in rows)


# Losses by position: those written out, on any mesh.


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its workdir, with a checkpoint of random parameters."""
    directory = tmp_path_factory.mktemp("run")
    config = small_config(corpus, directory, **SIZES)
    save(config)
    run_config.write(config, {"model.vocab_size": 264})
    return directory


def written_out(corpus: Path, workdir: Path, tokens: int) -> dict:
    """Losses of the tokens of all rows, by part: float64, one device, by a loop."""
    fields = {"attention": "vanilla", "data__context_tokens": tokens}
    config = small_config(corpus, workdir, **SIZES | fields)
    config.mesh.update(data=1, fsdp=1, ring=1, tensor=1)
    task = TextRun(config, partition_of(MeshShape()))
    parameters = jax.device_get(restored_parameters(task)[0])
    config.data.batch_rows = 1
    batches = TextRun(config, task.partition).batches("validation")
    found: dict[int, list[float]] = {}
    sizes = text.sizes(config)
    for step in range(len(batches)):
        (batch,) = batches[step].values()
        losses = token_losses(sizes, parameters, batch)
        for row, column in zip(*np.nonzero(batch.loss_weights), strict=True):
            below = 1
            while below <= batch.positions[row, column]:
                below *= 2
            found.setdefault(below, []).append(losses[row, column])
    return found


VANILLA = "--config.attention=vanilla --config.mesh.ring=1 --config.mesh.fsdp=4"
VANILLA = f"{VANILLA} --config.mesh.tensor=2".split()
MESHES = [
    (80, []),  # as it was trained: striped, fsdp 2 x ring 4
    (77, ["--config.attention=zigzag"]),
    pytest.param(80, VANILLA, marks=pytest.mark.slow),
]


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(("tokens", "flags"), MESHES)
def test_losses_of_all_parts_are_those_written_out(
    corpus, run, tmp_path, capsys, tokens, flags, bars
):
    flags = [f"--config.data.context_tokens={tokens}", *flags]
    output = tmp_path / "losses.json"
    flags += ["--corpus", str(corpus), "--output", str(output)]
    assert loss.main([f"--workdir={run}", *flags]) == 0
    assert bars[-1].n == bars[-1].total > 0
    *parts, whole = json.loads(output.read_text())
    wanted = written_out(corpus, run, tokens)
    assert [part["below"] for part in parts] == sorted(wanted)
    assert (whole["from"], whole["below"]) == (0, None)
    every = [loss for losses in wanted.values() for loss in losses]
    for row, losses in zip([*parts, whole], [*wanted.values(), every], strict=True):
        losses = wanted.get(row["below"], losses)
        assert (row["tokens"], row["step"]) == (len(losses), 7)
        assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))
    assert ("padded to 80" in capsys.readouterr().out) == (tokens == 77)


def test_another_corpus_is_read_if_its_tokenizer_is_the_runs(corpus, tmp_path, capsys):
    config = small_config(corpus, Path("here"), model__vocab_size=264)
    files = [tmp_path / f"{name}.txt" for name in "abcdefghijklmnop"]
    for file in files:
        file.write_text(f"Of the ring, {file.stem}. " * 40)
    # With as many ids.
    subwords = open_tokenizer(str(make_hugging_face(tmp_path / "tokenizer.json")))
    for name, tokenizer in ("bytes", ByteTokenizer()), ("subwords", subwords):
        prepare(files, tmp_path / name, tokenizer, validation_fraction=0.5)
    loss.set_corpus(config, tmp_path / "bytes")
    assert config.data.corpus == str(tmp_path / "bytes")
    with pytest.raises(ValueError, match="differ in their vocabulary"):
        loss.set_corpus(config, tmp_path / "subwords")
    assert not capsys.readouterr().out
    config.data.corpus = "gone"
    loss.set_corpus(config, tmp_path / "bytes")
    assert "the run's corpus (gone) is not here: nothing" in capsys.readouterr().out
