"""Files of prompts and of cases: published ones are read, wrong rows named."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from data.retrieval.lines import FORMS
from data.text.tokenizer import ByteTokenizer
from tools.lib.retrieval.cells import read_line_cells
from tools.lib.retrieval.files import prompt_file, read_cases, read_prompts
from tools.lib.retrieval.prompts import Encoder

PUBLISHED = Path(__file__).parents[1] / "fixtures" / "line_retrieval.jsonl"
"""Made by hand, in the fields and words of the published files."""
GOOD = {"random_idx": ["qx", 1], "expected_number": 47, "num_lines": 2}
GOOD |= {"correct_line": "qx47\n", "prompt": "bb11\nqx47\n\n"}


@pytest.mark.parametrize(
    ("row", "name", "depth", "cue", "answer"),
    [
        (0, "LRT-NL", 0.5, "Line <torpid-kid>: <REGISTER_CONTENT> is", " <24169>\n"),
        (1, "LRT", 1.0, "Line <2>: <REGISTER_CONTENT> is", " <31415>\n"),
    ],
)
def test_published_cases_are_asked_in_the_base_form(
    row, name, depth, cue, answer, tmp_path
):
    form, path = FORMS[name], tmp_path / "cases.jsonl"
    path.write_text(PUBLISHED.read_text().splitlines()[row])
    (cell,) = read_line_cells(form, Encoder(ByteTokenizer()), Namespace(cases=path))
    (prompt,), (case,) = cell.prompts, read_cases(path, form)
    # The prompt is what is drawn for the same lines.
    assert prompt.input == case.prompt and case.prompt.startswith(form.header)
    assert case.prompt.endswith((form.end + form.question).format(name=case.name))
    assert (prompt.answer_prefix, prompt.outputs) == (cue, (answer,))
    whole = prompt.input + cue + answer
    assert cell.length == prompt.length == cell.cache_tokens == len(whole)
    assert (cell.depth, cell.lines) == (depth, case.lines)


A_PAIR = "random_idx must be a name and a place, got "


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "must be an object, got list"),
        ({"prompt": None}, "it has no prompt"),
        ({"expected_number": "7"}, "expected_number must be int, got '7'"),
        ({"num_lines": True}, "num_lines must be int, got True"),
        ({"random_idx": [1]}, rf"{A_PAIR}\[1\]"),
        ({"random_idx": ["a", "b"]}, A_PAIR),
        ({"random_idx": ["qx", True]}, A_PAIR),
        ({"random_idx": [True, 0]}, A_PAIR),
        ({"random_idx": [1] * 10**5}, rf"{A_PAIR}.*1, \.\.\.\]"),
        ({"random_idx": ["qx", 2]}, "must be below num_lines=2, got 2"),
        ({"random_idx": ["qx", -1]}, "must be below num_lines=2, got -1"),
        ({"expected_number": 5}, "'qx47' is written otherwise than 'qx5': choose the"),
        ({"random_idx": ["??", 0]}, r"is written otherwise than '\?\?47'"),
        ({"prompt": "nothing"}, "'qx47' is not in the prompt"),
        ({"prompt": "qx47\n\ud83d"}, "surrogates not allowed"),
        ("[" * 100_000, "lie too deep in each other"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_bad_row_is_named_with_its_reason(tmp_path, change, reason):
    if isinstance(change, dict):
        fields = {k: v for k, v in (GOOD | change).items() if v is not None}
        change = json.dumps(fields)
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{change}\n")
    with pytest.raises(ValueError, match=reason) as error:
        read_cases(path, FORMS["compact"])
    assert str(error.value).startswith(f"{path}:3 must be a case: ")
    assert str(error.value).isprintable() and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("row", "reason"),
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
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no cases"):
        read_cases(tmp_path / "empty.jsonl", FORMS["LRT"])
