"""Files of prompts and of cases: published ones are read, wrong rows named."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from data.retrieval.lines import FORMS
from data.text.tokenizer import ByteTokenizer
from tests.cases import pairs
from tools.lib.retrieval.cells import read_line_cells
from tools.lib.retrieval.files import read_cases, read_prompts
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


LONG = [
    ("case " + "[" * 100_000, "lie too deep in each other"),
    ("case " + json.dumps({"random_idx": [1] * 10**5}), "a name and a place, got [1"),
]


@pytest.mark.parametrize(
    ("row", "reason"),
    [*pairs("retrieval_rows.txt"), *LONG],
    ids=lambda value: value[:50],
)
def test_a_bad_row_is_named_with_its_reason(tmp_path, row, reason):
    kind, _, change = row.partition(" ")
    good = GOOD if kind == "case" else {"input": "a", "outputs": ["b"]}
    if kind == "case" and change.startswith('{"'):
        fields = GOOD | json.loads(change)
        change = json.dumps({k: v for k, v in fields.items() if v is not None})
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{change}")
    with pytest.raises(ValueError) as error:
        read_cases(path, FORMS["compact"]) if kind == "case" else [*read_prompts(path)]
    message = str(error.value)
    assert message.startswith(f"{path}:3 must be a {kind}: ") and reason in message
    assert message.isprintable() and len(message) < 500


def test_a_file_without_cases_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="has no cases"):
        read_cases(tmp_path / "empty.jsonl", FORMS["LRT"])
