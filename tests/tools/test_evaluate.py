"""RULER, line retrieval and losses by position, on models of known behaviour."""

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.chat.chat_template import open_template
from data.retrieval.lines import FORMS
from data.text.corpus import prepare
from data.text.tokenizer import ByteTokenizer, begun, open_tokenizer
from models.sampling import Sampling
from tasks import run_config, text
from tasks.generation import generator, restored_parameters
from tasks.text import TextRun
from tests.data.test_tokenizer import make_hugging_face
from tests.hard_rows import token_losses
from tests.small.models import partition_of
from tests.small.runs import small_config, small_flags
from tests.tools.test_generate import save
from tools import evaluate, figures
from tools.lib.evaluation import loss
from tools.lib.evaluation.line_retrieval import score_cells
from tools.lib.retrieval.answers import Generated, forced
from tools.lib.retrieval.cells import Cell, line_cells
from tools.lib.retrieval.files import prediction_file, prompt_file, read_prompts
from tools.lib.retrieval.prompts import Encoder, Prompt
from training.mesh import MeshShape

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
        prompt.input + prompt.answer_prefix: ", ".join(prompt.outputs)
        for path in folder.glob("**/data/*/validation.jsonl")
        for prompt in read_prompts(path)
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
    assert "average 50.0, weighted to long 33.3" in shown
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
    assert (evaluated / "needles.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.quick
def test_an_evaluation_goes_on_where_it_was_killed(asked, ask, evaluated):
    before = predictions(evaluated)
    prediction_file(evaluated, 1200, "fwe").unlink()
    path = prediction_file(evaluated, 1200, "niah_single_1")
    path.write_bytes(path.read_bytes()[:-20])  # in the middle of the third row
    asked.clear()
    assert ask(RULER, "--output", evaluated) == 0
    assert len(asked) == 1 + 3
    assert predictions(evaluated) == before


@pytest.mark.quick
def test_predictions_of_something_else_are_left_alone(
    ask, prompts, evaluated, tmp_path, capsys
):
    before = predictions(evaluated)
    capsys.readouterr()
    assert ask(RULER, "--output", evaluated, "--prompts", prompts) == 1
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


def test_prompts_in_a_template_are_refused(ask, tmp_path, capsys):
    """Special tokens in a text are text: a chat's model would read other tokens."""
    path = prompt_file(tmp_path, 1000, "niah_single_1")
    path.parent.mkdir(parents=True)
    path.write_text('{"input": "<end>Where?<end>", "outputs": ["b"]}\n')
    assert ask(RULER, "--output", tmp_path / "new", "--prompts", tmp_path) == 1
    said = capsys.readouterr().err
    assert "has <end> in a prompt, where it would be text" in said
    assert said.count("\n") == 1 and not (tmp_path / "new").exists()


def cells(name, lengths, depths, samples, seed=1) -> list[Cell]:
    sizes = {"lengths": lengths, "depths": depths, "samples": samples}
    options = Namespace(**sizes, seed=seed, cases=None)
    return line_cells(FORMS[name], Encoder(BYTES), options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mask",
    [
        "prefix(50)",  # longer than some prompts, which then are their own prefix
        pytest.param("causal", marks=pytest.mark.slow),
        pytest.param("window(9)", marks=pytest.mark.slow),
    ],
)
def test_what_is_generated_is_what_is_likeliest_when_shown(workdir, mask):
    """On any model: its own answers are all right, and none that differs in a token."""
    config = small_config("", workdir, mask=mask, **WHOLE)
    run = TextRun.of(config, jax.devices())  # fsdp 2 x ring 4
    parameters, _ = restored_parameters(run)
    # ASCII: tokens differ in their text.
    greedy = Sampling(temperature=0, allowed_tokens=128)
    drawn = generator(run, greedy, rows=4, cache_tokens=80)
    forcing = partial(forced(run, drawn, 128), parameters)
    short, long = cells("compact", (40, 75), 1, 5)
    # A batch has both lengths, so that there is one to compile for.
    pairs = zip(short.prompts, long.prompts, strict=True)
    asked = [Encoder(BYTES)(prompt) for pair in pairs for prompt in pair]
    texts = Generated(drawn, parameters, BYTES, 4, [])(asked)
    assert len(texts) == 10 and len(set(texts)) > 1
    answers = [BYTES.encode(text) for text in texts]
    assert forcing(asked, answers) == [True] * 10
    for place in range(4):
        wrong = [answer.copy() for answer in answers]
        for answer in wrong:
            answer[place] ^= 1
        assert forcing(asked, wrong) == [False] * 10
    mixed = answers[:7] + wrong[7:]
    assert forcing(asked, mixed) == [True] * 7 + [False] * 3


@pytest.mark.thorough
def test_program_writes_rows_and_a_picture_of_each_run(ask, workdir, tmp_path):
    output = tmp_path / "lines"
    (tmp_path / "beside").symlink_to(workdir)
    runs = [str(workdir), str(tmp_path / "beside")]
    options = "--lengths 62,64 --depths 2 --samples 2 --output".split()
    options = [*options, output, "--compare", runs[1]]
    assert ask("line-retrieval --form compact", *options) == 0
    rows = json.loads(output.with_suffix(".json").read_text())
    places = [(length, depth) for length in (62, 64) for depth in (0, 1)]
    assert [(row["run"], row["length"], row["depth"]) for row in rows] == [
        (run, *place) for run in runs for place in places
    ]
    for row in rows:
        assert (row["step"], row["samples"]) == (7, 2)
        assert row["generated"] == row["teacher_forced"]
        assert row["length"] - 5 < row["tokens"] <= row["length"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


TOKENS = {"compact": (100, 200), "letters": (60, 150)}
TOKENS |= dict.fromkeys(["LRT", "LRT-NL"], (800, 1200))


@pytest.mark.parametrize("name", FORMS)
def test_each_cell_gets_the_scores_of_its_own_cases(name):
    """All are right but for one text of the first depth, and one answer of the last."""
    given, calls = cells(name, TOKENS[name], 3, 4), []
    assert all(c.cache_tokens == max(p.length for p in c.prompts) for c in given)
    known = {p.input + p.answer_prefix: p.outputs[0] for c in given for p in c.prompts}

    def generate(prompts):
        calls.append(len(prompts))
        texts = [known[BYTES.decode(prompt)] + "line 5: 123" for prompt in prompts]
        return [*texts[:3], "987654", *texts[4:]]

    def force(prompts, answers):
        pairs = zip(prompts, answers, strict=True)
        right = [known[BYTES.decode(p)] == BYTES.decode(answer) for p, answer in pairs]
        return [*right[:-1], False]

    rows = score_cells(given, Encoder(BYTES), generate, force)
    assert [(row["length"], row["depth"]) for row in rows] == [
        (length, depth) for length in TOKENS[name] for depth in (0, 0.5, 1)
    ]
    assert [row["generated"] for row in rows] == 2 * [0.75, 1, 1]
    assert [row["teacher_forced"] for row in rows] == 2 * [1, 1, 0.75]
    assert calls == [12, 12]  # cells of one length go together
    if name == "compact":
        assert rows[0]["samples"] == 4 and 95 < rows[0]["tokens"] <= 100
        assert rows[0]["lines"] == pytest.approx(100 / 5, abs=2)


def test_cases_of_a_cell_differ_and_one_depth_is_in_the_middle():
    (cell,) = cells("compact", (120,), 1, 4)
    assert cell.depth == 0.5 and len({prompt.input for prompt in cell.prompts}) == 4
    assert cells("compact", (120,), 1, 4, seed=2)[0].prompts != cell.prompts


# Losses by position: those written out, on any mesh.


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its workdir, with a checkpoint of random parameters."""
    directory = tmp_path_factory.mktemp("run")
    config = small_config(corpus, directory, **SIZES)
    save(config)
    run_config.write(config, {"model.vocab_size": 264})
    return directory


def evaluate_loss(workdir: Path, output: Path, *flags: str) -> list[dict[str, Any]]:
    arguments = [f"--workdir={workdir}", *flags, "--output", str(output / "losses")]
    assert loss.main(arguments) == 0
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "losses.json").read_text())


def written_out(corpus: Path, workdir: Path, tokens: int, by: str) -> dict:
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
            place = column if by == "row" else batch.positions[row, column]
            below = 1
            while below <= place:
                below *= 2
            found.setdefault(below, []).append(losses[row, column])
    return found


VANILLA = "--config.attention=vanilla --config.mesh.ring=1 --config.mesh.fsdp=4"
VANILLA = f"{VANILLA} --config.mesh.tensor=2".split()
MESHES = [
    ("row", 80, []),  # as it was trained: striped, fsdp 2 x ring 4
    ("document", 77, ["--config.attention=zigzag"]),
    pytest.param("document", 80, VANILLA, marks=pytest.mark.slow),
]


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(("by", "tokens", "flags"), MESHES)
def test_losses_of_all_parts_are_those_written_out(
    corpus, run, tmp_path, capsys, by, tokens, flags
):
    flags = [f"--config.data.context_tokens={tokens}", "--by", by, *flags]
    flags += ["--corpus", str(corpus)]
    *parts, whole = evaluate_loss(run, tmp_path, *flags)
    wanted = written_out(corpus, run, tokens, by)
    assert [part["below"] for part in parts] == sorted(wanted)
    assert (whole["from"], whole["below"]) == (0, None)
    every = [loss for losses in wanted.values() for loss in losses]
    for row, losses in zip([*parts, whole], [*wanted.values(), every], strict=True):
        losses = wanted.get(row["below"], losses)
        assert (row["tokens"], row["by"], row["step"]) == (len(losses), by, 7)
        assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))
    assert ("padded to 80" in capsys.readouterr().out) == (tokens == 77)
    drawn = ["losses", *2 * [str(tmp_path / "losses.json")]]
    assert figures.main([*drawn, "--output", str(tmp_path / "two.png")]) == 0


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


def test_rows_that_no_batch_holds_are_refused(run, tmp_path, capsys):
    tokens = "--config.data.context_tokens=90000"
    assert loss.main([f"--workdir={run}", tokens, "--output", str(tmp_path / "x")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "do not fit in the" in error
    assert list(tmp_path.iterdir()) == []
