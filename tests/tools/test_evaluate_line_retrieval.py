"""The evaluation of line retrieval as a program, on models of known behaviour."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.line_corpus import LineDocuments, prepare_lines
from data.line_forms import Compact
from data.line_retrieval import base_form, read_cases
from data.tokenizer import ByteTokenizer
from models.sampling import Sampling
from tasks import base
from tasks.generation import generator, restored_parameters
from tests.runs import small_config, small_flags
from tests.tools.test_generate import save
from tools.lib.evaluation.line_retrieval import draw_cells, main, read_cells
from tools.lib.retrieval.scores import Forced, Generated, forced

BYTES = ByteTokenizer()
SIZES = {"data__rows": "whole", "simulated_devices": 0, "implementation": "reference"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only its tokenizer matters."""
    directory = tmp_path_factory.mktemp("data") / "corpus"
    sizes = {"train_tokens": 20_000, "validation_tokens": 500}
    prepare_lines(LineDocuments(Compact(), BYTES, 80, 24), directory, **sizes, seed=0)
    return directory


@pytest.fixture(scope="module")
def workdir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoint of random parameters, which answer all kinds of things."""
    directory = tmp_path_factory.mktemp("run")
    save(small_config(corpus, directory, **SIZES))
    return directory


def programs(corpus: Path, workdir: Path, mask: str) -> tuple[Generated, Forced, Any]:
    """What writes and what is shown answers, on fsdp 2 x ring 4."""
    config = small_config(corpus, workdir, mask=mask, **SIZES)
    partition = base.partition(config, jax.devices())
    parameters, _ = restored_parameters(config, partition)
    allowed = 128  # ASCII, so that tokens can be told from their text
    sampling = Sampling(temperature=0, allowed_tokens=allowed)
    drawn = generator(config, partition, sampling, rows=4, cache_tokens=80)
    generated = Generated(drawn, parameters, BYTES, 4, [])
    forcing = forced(config, partition, rows=4, allowed_tokens=allowed)
    return generated, forcing, parameters


def prompts(count: int) -> list[np.ndarray]:
    """Of unlike lengths."""
    cells = draw_cells(Compact(), BYTES, (40, 60, 75), 2, count // 6, seed=9)
    cases = [case for cell in cells for case in cell.cases]
    return [BYTES.encode(base_form(Compact(), case)[0]) for case in cases]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "mask",
    [
        "prefix(50)",  # longer than some prompts, which then are their own prefix
        pytest.param("causal", marks=pytest.mark.slow),
        pytest.param("window(9)", marks=pytest.mark.slow),
    ],
)
def test_what_is_generated_is_what_is_likeliest_when_shown(corpus, workdir, mask):
    """On any model: its own answers are all right, and none that differs in a token."""
    generated, forcing, parameters = programs(corpus, workdir, mask)
    asked = prompts(18)  # no multiple of the rows
    texts = generated(asked)
    assert len(texts) == 18 and len(set(texts)) > 1
    answers = [BYTES.encode(text) for text in texts]
    assert forcing(parameters, asked, answers) == [True] * 18
    for place in range(4):
        wrong = [answer.copy() for answer in answers]
        for answer in wrong:
            answer[place] ^= 1
        assert forcing(parameters, asked, wrong) == [False] * 18
    mixed = answers[:7] + wrong[7:]
    assert forcing(parameters, asked, mixed) == [True] * 7 + [False] * 11


def evaluate(corpus: Path, workdir: Path, *options: str) -> int:
    flags = small_flags(corpus, workdir, **SIZES)
    return main([*flags, "--form", "compact", *options])


@pytest.mark.thorough
def test_program_writes_rows_and_a_picture_of_each_run(
    corpus, workdir, tmp_path, capsys
):
    output, cases = tmp_path / "lines", tmp_path / "cases.jsonl"
    drawn = ["--lengths", "50,60", "--depths", "2", "--samples", "3", "--seed", "5"]
    (tmp_path / "beside").symlink_to(workdir)
    runs = [str(workdir), str(tmp_path / "beside")]
    options = [*drawn, "--compare", runs[1], "--save-cases", str(cases)]
    assert evaluate(corpus, workdir, *options, "--output", str(output)) == 0
    told = capsys.readouterr().out
    assert all(told.count(f"{run}, step 7") == 1 for run in runs)
    assert "teacher-forced" in told
    rows = json.loads(output.with_suffix(".json").read_text())
    cells = [(length, depth) for length in (50, 60) for depth in (0, 1)]
    assert [(row["run"], row["length"], row["depth"]) for row in rows] == [
        (run, *cell) for run in runs for cell in cells
    ]
    for row in rows:
        assert (row["step"], row["samples"], row["device_count"]) == (7, 3, 8)
        assert row["generated"] == row["teacher_forced"]
        assert row["length"] - 5 < row["tokens"] <= row["length"]
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert len(read_cases(cases)) == 12
    drawn_cells = draw_cells(Compact(), BYTES, (50, 60), 2, 3, seed=5)
    read = read_cells(cases, Compact(), BYTES)
    assert [cell.cases for cell in read] == [cell.cases for cell in drawn_cells]
    assert [(cell.length, cell.depth) for cell in read] == [
        (round(row["tokens"]), row["depth"]) for row in rows[:4]
    ]


# Options: what is said of them.
BAD = {
    "--lengths 9000": "all of the 256 lines",
    "--lengths 5": "5 tokens are too few",
    "--lengths 40 --samples 0": "--samples: must be a whole number",
    "--compare a --compare a": "give each of them once",
    "--cases nowhere.jsonl": "no file nowhere.jsonl",
    "--cases tests/fixtures/line_retrieval.jsonl": "jsonl, case 1: 'line torpid",
    "--lengths 40 --rows 3": "3",
    "--length 40": "length",
}


@pytest.mark.parametrize("options", BAD)
def test_what_is_wrong_is_said_in_short(corpus, workdir, options, capsys):
    assert evaluate(corpus, workdir, *options.split()) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and BAD[options] in err
