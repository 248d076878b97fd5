"""Files of prompts and of cases: published ones are read, wrong rows named."""

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from data.retrieval.line_forms import FORMS, Compact, NamedLines, NumberedLines
from data.retrieval.line_retrieval import Case, draw_case
from data.text.tokenizer import ByteTokenizer
from tools.lib.retrieval.cells import read_line_cells
from tools.lib.retrieval.files import prompt_file, read_cases, read_prompts, write_cases
from tools.lib.retrieval.prompts import Encoder

BYTES = ByteTokenizer()
PUBLISHED = Path(__file__).parents[1] / "fixtures" / "line_retrieval.jsonl"
"""Made by hand, in the fields and words of the published files."""


def draw(form, seed=0) -> Case:
    rng = np.random.default_rng(seed)
    return draw_case(form, BYTES, rng, tokens=1200 if form.header else 150, depth=0.5)


def test_a_file_in_the_published_format_is_read():
    first, second = read_cases(PUBLISHED)
    assert first.random_idx == ("torpid-kid", 1) and first.expected_number == 24169
    assert (first.num_lines, first.depth) == (3, 0.5)
    assert second.random_idx == (2, 1) and second.depth == 1
    # Their prompts are what is drawn for the same lines.
    for case, form in ((first, NamedLines()), (second, NumberedLines())):
        body = case.prompt.removeprefix(form.header)
        assert body != case.prompt
        assert body.endswith(form.end + form.question(case.name))
        assert form.line(case.name, case.expected_number) == case.correct_line


def test_cases_are_asked_in_the_base_form_and_those_of_another_form_refused(tmp_path):
    path = tmp_path / "cases.jsonl"
    path.write_text(PUBLISHED.read_text().splitlines(keepends=True)[0])
    options = Namespace(cases=path)
    (cell,) = read_line_cells(NamedLines(), Encoder(BYTES), options)
    (prompt,) = cell.prompts
    asked = prompt.input + prompt.answer_prefix
    assert asked.endswith("number.Line <torpid-kid>: <REGISTER_CONTENT> is")
    assert prompt.outputs == (" <24169>\n",)
    assert cell.length == prompt.length == len(asked) + len(" <24169>\n")
    with pytest.raises(ValueError, match="case 1: 'line torpid-kid: .* choose the for"):
        read_line_cells(Compact(), Encoder(BYTES), options)


@pytest.mark.parametrize("name", FORMS)
def test_written_cases_are_read_again(name, tmp_path):
    cases = [draw(FORMS[name](), seed=seed) for seed in range(3)]
    write_cases(tmp_path / "cases.jsonl", cases)
    assert read_cases(tmp_path / "cases.jsonl") == cases
    row = json.loads((tmp_path / "cases.jsonl").read_text().splitlines()[0])
    fields = "random_idx", "expected_number", "num_lines", "correct_line", "prompt"
    assert tuple(row) == fields
    with pytest.raises(FileExistsError, match="cases.jsonl exists"):
        write_cases(tmp_path / "cases.jsonl", cases)
    assert [path.name for path in tmp_path.iterdir()] == ["cases.jsonl"]


A_PAIR = "random_idx must be a name and a place, got "


@pytest.mark.parametrize(
    "change, reason",
    [
        ("{", "Expecting property name"),
        ("[]", "must be an object, got list"),
        ({"prompt": None}, "it has no prompt"),
        ({"expected_number": "7"}, "expected_number must be int, got '7'"),
        ({"num_lines": True}, "num_lines must be int, got True"),
        ({"random_idx": [1]}, rf"{A_PAIR}\[1\]"),
        ({"random_idx": ["a", "b"]}, A_PAIR),
        ({"num_lines": 1, "random_idx": ["aa", 1]}, "must be below num_lines=1, got 1"),
        ({"expected_number": 5}, "does not say 5"),
        ({"random_idx": ["??", 0]}, r"is not called '\?\?'"),
        ({"prompt": "nothing"}, "is not in the prompt"),
        ({"random_idx": ["aa", True]}, A_PAIR),
        ({"random_idx": [True, 0]}, A_PAIR),
        ({"prompt": draw(Compact()).prompt + "\ud83d"}, "surrogates not allowed"),
        ("[" * 100_000, "lie too deep in each other"),
        ('{"num_lines": ' + "9" * 5000 + "}", "an integer of thousands of"),
        ('{"prompt": "", "prompt": ""}', "'prompt' stands twice"),
        ({"random_idx": [1] * 10**5}, rf"{A_PAIR}.*1, \.\.\.\]"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_row_is_named_with_its_reason(tmp_path, change, reason):
    good = asdict(draw(Compact()))
    if isinstance(change, dict):
        fields = {k: v for k, v in (good | change).items() if v is not None}
        change = json.dumps(fields)
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{change}\n")
    with pytest.raises(ValueError, match=reason) as error:
        read_cases(path)
    assert str(error.value).startswith(f"{path}:3 must be a case: ")
    assert str(error.value).isprintable() and len(str(error.value)) < 500


@pytest.mark.parametrize(
    "row, reason",
    [
        ("[]", "it must have an input, outputs"),
        ('{"input": "a", "outputs": []}', "it must have an input, outputs"),
        ('{"input": "a", "outputs": [1]}', "it must have an input, outputs"),
        ('{"input": "a", "outputs": ["b"], "length": "9"}', "it must have an input"),
        ('{"input": "a", "outp', "Unterminated string"),
    ],
)
def test_rows_that_are_not_prompts_are_named(row, reason, tmp_path):
    path = prompt_file(tmp_path, 64, "vt")
    path.parent.mkdir(parents=True)
    path.write_text('{"input": "a", "outputs": ["b"]}\n' + row)
    with pytest.raises(ValueError, match=f"jsonl:2 must be a prompt: {reason}"):
        list(read_prompts(path))


def test_a_file_without_cases_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        read_cases(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no cases"):
        read_cases(tmp_path / "empty.jsonl")
