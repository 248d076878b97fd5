"""Scores of line retrieval, by models that are stubs."""

import re

import numpy as np
import pytest

from data.line_forms import FORMS
from data.tokenizer import ByteTokenizer
from tools.lib.evaluation.line_retrieval import draw_cells
from tools.lib.retrieval.table import Scorer, by_length, table

BYTES = ByteTokenizer()
LENGTHS = {"compact": (100, 200), "letters": (60, 150)}
LENGTHS |= dict.fromkeys(["LRT", "LRT-NL"], (800, 1200))


class Oracle:
    """Looks the line up in the prompt, and goes on with another line after it."""

    def __init__(self, form):
        self.form, self.calls = form, 0

    def find(self, prompt: np.ndarray) -> str:
        text = BYTES.decode(prompt)
        template = re.escape(self.form.line("NAME", 77))
        pattern = template.replace("NAME", r"([^\s\d]+|\d+)").replace("77", r"(\d+)")
        lines = re.findall(pattern, text)
        return next(n for name, n in lines if text.endswith(self.form.cue(name)))

    def generate(self, prompts) -> list[str]:
        self.calls += 1
        return [self.form.answer(int(self.find(p))) + "line 5: 123" for p in prompts]

    def force(self, prompts, answers) -> list[bool]:
        return [
            BYTES.decode(answer) == self.form.answer(int(self.find(prompt)))
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


@pytest.mark.parametrize("name", FORMS)
def test_an_oracle_is_always_right_and_a_constant_never(name):
    form = FORMS[name]()
    oracle = Oracle(form)
    cells = draw_cells(form, BYTES, LENGTHS[name], depths=3, samples=4, seed=1)
    rows = Scorer(form, BYTES, oracle.generate, oracle.force).rows(cells)
    assert [(row["length"], row["depth"]) for row in rows] == [
        (length, depth) for length in LENGTHS[name] for depth in (0, 0.5, 1)
    ]
    assert all(row["generated"] == row["teacher_forced"] == 1 for row in rows)
    assert oracle.calls == 2  # cells of one length go together

    def generate(prompts):
        return ["987654"] * len(prompts)  # no line of any form says so

    def force(prompts, answers):
        return [False] * len(prompts)

    for row in Scorer(form, BYTES, generate, force).rows(cells):
        assert row["generated"] == row["teacher_forced"] == 0


def test_each_cell_gets_the_scores_of_its_own_cases():
    """Right at the first depth only, when written, and at the last, when shown."""
    form = FORMS["compact"]()
    oracle = Oracle(form)
    cells = draw_cells(form, BYTES, (120,), depths=2, samples=4, seed=3)

    def generate(prompts):
        return oracle.generate(prompts[:3]) + ["none"] * (len(prompts) - 3)

    def force(prompts, answers):
        return [False] * 4 + oracle.force(prompts[4:], answers[4:])

    first, last = Scorer(form, BYTES, generate, force).rows(cells)
    assert (first["generated"], first["teacher_forced"]) == (0.75, 0)
    assert (last["generated"], last["teacher_forced"]) == (0, 1)
    assert first["samples"] == 4 and 115 < first["tokens"] <= 120
    assert by_length([first, last], "generated") == {120: 0.375}
    text = table([first, last])
    assert "37.5%" in text and "50.0%" in text and " 120 " in text


def test_cells_are_drawn_alike_for_one_seed_and_unlike_for_another():
    form = FORMS["compact"]()

    def draw(seed):
        return draw_cells(form, BYTES, (120,), depths=2, samples=2, seed=seed)

    assert draw(4) == draw(4) != draw(5)
    cases = [case for cell in draw(4) for case in cell.cases]
    assert len({case.prompt for case in cases}) == 4
    assert [cell.depth for cell in draw_cells(form, BYTES, (120,), 1, 1, 0)] == [0.5]
    for numbers in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match="must be at least 1, and seed="):
            draw_cells(form, BYTES, (120,), *numbers)
