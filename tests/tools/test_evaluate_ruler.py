"""RULER as a program, on models of known behaviour."""

import json
from pathlib import Path

import pytest

from data.chat_template import open_template
from data.tokenizer import ByteTokenizer, begun
from tests.runs import small_config, small_flags
from tests.tools.test_generate import save
from tools.lib.evaluation.ruler import main
from tools.lib.retrieval.scores import Generated
from tools.lib.ruler.cells import Encoder
from tools.lib.ruler.samples import prediction_file, prompt_file, read_prompts
from tools.lib.ruler.sizing import Draft
from tools.lib.ruler.table import heat_rows, table, task_row

BYTES = ByteTokenizer()
SIZES = {"simulated_devices": 0, "implementation": "reference"}
TASKS, LENGTHS = ("niah_single_1", "fwe"), (1000, 1200)
OPTIONS = "--tasks niah_single_1,fwe --lengths 1000,1200 --samples 3 --tokenizer bytes"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint of random parameters."""
    directory = tmp_path_factory.mktemp("run")
    save(small_config("", directory, **SIZES))
    return directory


def evaluate(workdir: Path, *options: object) -> int:
    flags = small_flags("", workdir, **SIZES)
    return main([*flags, *OPTIONS.split(), *map(str, options)])


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


@pytest.fixture(scope="module")
def prompts(workdir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    flags = small_flags("", workdir, **SIZES)
    assert main([*flags, *OPTIONS.split(), "--save-prompts", str(folder)]) == 0
    return folder


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


@pytest.mark.quick
def test_right_answers_score_100_in_the_table_and_in_the_rows(
    asked, prompts, workdir, tmp_path, capsys
):
    folder = tmp_path / "ruler"
    assert evaluate(workdir, "--output", folder) == 0
    assert set(asked) == read_answers(prompts).keys()
    shown = capsys.readouterr().out
    assert "average                100.0*       0.0\n" in shown
    assert "of 2 of RULER's 13 tasks: average 50.0, weighted to long 33.3" in shown
    assert "effective length: 1,000 tokens" in shown
    rows = json.loads((folder / "scores.json").read_text())["rows"]
    cells = [(length, task) for length in LENGTHS for task in TASKS]
    assert [(row["length"], row["task"]) for row in rows] == cells
    assert [(row["score"], row["nulls"]) for row in rows] == 2 * [(100, 0)] + 2 * [
        (0, 3)
    ]
    for row in rows:
        assert (row["run"], row["step"], row["samples"]) == (str(workdir), 7, 3)
        # On a ring of 4: keys and values of 2 layers, 2 heads, 8 numbers; the index.
        expected = row["length"] // 4 * (2 * 2 * 2 * 8 * 4 + 4)
        assert row["cache_bytes"] == pytest.approx(expected, abs=64)
    first = json.loads(predictions(folder)["1000/pred/fwe.jsonl"].splitlines()[0])
    # What NVIDIA's eval/evaluate.py reads.
    assert {"input", "pred", "outputs", "others", "index"} <= first.keys()
    assert (folder / "needles.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.quick
def test_an_evaluation_goes_on_where_it_was_killed(asked, workdir, tmp_path):
    folder = tmp_path / "ruler"
    assert evaluate(workdir, "--output", folder) == 0
    before = predictions(folder)
    prediction_file(folder, 1200, "fwe").unlink()
    path = prediction_file(folder, 1200, "niah_single_1")
    path.write_bytes(path.read_bytes()[:-20])  # in the middle of the third row
    asked.clear()
    assert evaluate(workdir, "--output", folder) == 0
    assert len(asked) == 1 + 3
    assert predictions(folder) == before


@pytest.mark.quick
def test_predictions_of_something_else_are_left_alone(
    asked, prompts, workdir, tmp_path, capsys
):
    folder = tmp_path / "ruler"
    assert evaluate(workdir, "--output", folder) == 0
    before = predictions(folder)
    capsys.readouterr()
    assert evaluate(workdir, "--output", folder, "--prompts", prompts) == 1
    assert "has predictions with files [], and these" in capsys.readouterr().err
    assert predictions(folder) == before
    (tmp_path / "letter").write_text("mine")
    assert evaluate(workdir, "--output", tmp_path) == 1
    assert "is not empty, and has no run.json" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_model_answers_through_the_ring(workdir, tmp_path):
    """With random parameters, on rings of 4 and of 1: the same answers."""
    for ring, data in ((4, 1), (1, 4)):
        mesh = f"--config.mesh.ring={ring}", f"--config.mesh.data={data}"
        folder = "--output", tmp_path / str(ring)
        shape = "--tasks", "fwe", "--lengths", 460, "--samples", 1
        assert evaluate(workdir, *mesh, *shape, *folder) == 0
    assert predictions(tmp_path / "4") == predictions(tmp_path / "1")


def test_the_prefix_begins_the_answer_of_a_base_model_and_of_a_chat():
    draft = Draft("Where?", " It is at", ("home",))
    base = Encoder(BYTES, None)
    assert (
        base(draft).tolist() == begun(BYTES, BYTES.encode("Where? It is at")).tolist()
    )
    assert base.count(draft) == len("Where? It is at")
    template = open_template("vicuna", BYTES)
    chat = Encoder(BYTES, template)
    asked = template.prompt([{"role": "user", "content": "Where?"}])
    assert chat(draft).tolist() == [*asked, *BYTES.encode(" It is at")]
    assert BYTES.decode(chat(draft)).endswith("USER: Where? ASSISTANT: It is at")
    assert chat.count(draft) == len(chat(draft)) > base.count(draft)


def test_cells_of_needles_are_by_depth():
    def row(depth, text):
        return {"pred": text, "outputs": ["7"], "others": {"depth": depth}}

    found = task_row(
        "niah_single_1", 64, [row(0.0, "7"), row(0.05, "8"), row(1.0, "7")]
    )
    assert found["score"] == 66.67
    assert [(r["depth"], r["generated"]) for r in heat_rows([found])] == [
        (0.05, 0.5),
        (0.95, 1.0),
    ]
    assert "niah_single_1" in table([found]) and "by_depth" not in task_row(
        "vt", 64, [row(0, "")]
    )


# Options: what is said of them.
BAD = {
    "--tasks niah": "niah must be one of niah_single_1, ",
    "--lengths 4096,x": "must be a whole number, got 'x'",
    "--tasks qa_1": "qa_1 needs a file: give its --squad",
    "--tasks niah_single_2": "niah_single_2 needs a file: give its --haystack",
    "--tasks qa_1 --squad nowhere.json": "there is no SQuAD file nowhere.json",
    "--tasks niah_single_2 --haystack nowhere": "there is no file nowhere",
    "--lengths 300": "niah_single_1 at 300 tokens: 300 tokens are too few",
    "--tasks vt --lengths 9000": "vt at 9000 tokens: 500 tokens are too few",
    "--prompts nowhere": "no file nowhere/1000/data/niah_single_1/validation.jsonl",
    "--save-prompts x": "not allowed with argument",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_are_refused_before_anything_is_computed(
    options, workdir, tmp_path, capsys
):
    assert evaluate(workdir, "--output", tmp_path / "new", *options.split()) == 1
    said = capsys.readouterr().err
    assert BAD[options] in said and said.count("\n") == 1
    assert not (tmp_path / "new").exists()


# Rows of a file: what is said of them.
ROWS = {
    "[]": "must have an input, outputs",
    '{"input": "a", "outputs": []}': "must have an input, outputs",
    '{"input": "a", "outputs": [1]}': "must have an input, outputs",
    '{"input": "a", "outputs": ["b"], "length": "9"}': "must have an input, outputs",
    '{"input": "a", "outp': "is not JSON",
}


@pytest.mark.parametrize("row", ROWS)
def test_rows_that_are_not_prompts_are_named(row, tmp_path):
    path = prompt_file(tmp_path, 64, "vt")
    path.parent.mkdir(parents=True)
    path.write_text('{"input": "a", "outputs": ["b"]}\n' + row)
    with pytest.raises(ValueError, match=f"validation.jsonl:2 {ROWS[row]}"):
        list(read_prompts(path))


def test_prompts_in_a_template_are_refused(workdir, tmp_path, capsys):
    """Special tokens in a text are text: a chat's model would read other tokens."""
    path = prompt_file(tmp_path, 1000, "niah_single_1")
    path.parent.mkdir(parents=True)
    path.write_text('{"input": "<end>Where?<end>", "outputs": ["b"]}\n')
    assert evaluate(workdir, "--output", tmp_path / "new", "--prompts", tmp_path) == 1
    said = capsys.readouterr().err
    assert "has <end> in a prompt, where it would be text" in said
    assert said.count("\n") == 1 and not (tmp_path / "new").exists()
