"""Line retrieval scored: cells of cases, one for each length and depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from data.line_forms import LineForm
from data.line_retrieval import Case, base_form, is_answered
from data.tokenizer import Tokenizer, begun


@dataclass(frozen=True)
class Cell:
    """Cases of one length and depth.

    length: in tokens. depth: of the line, from 0 to 1.
    """

    length: int
    depth: float
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Scorer:
    """Makes rows of cells.

    generate: from prompts, int (n,) each, to the texts that follow.
    force: from prompts and answers to whether every token of each answer is the
      likeliest.
    """

    form: LineForm
    tokenizer: Tokenizer
    generate: Callable[[Sequence[np.ndarray]], Sequence[str]]
    force: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], Sequence[bool]]

    def rows(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Returns a row for each cell: shares of its cases that are right, from 0 to 1.

        Cells of one length that follow each other are computed together.
        """
        rows = []
        for _, group in groupby(cells, key=lambda cell: cell.length):
            rows += self._rows(list(group))
        return rows

    def _rows(self, cells: list[Cell]) -> list[dict[str, Any]]:
        cases = [case for cell in cells for case in cell.cases]
        texts = [base_form(self.form, case) for case in cases]
        encoded = self.tokenizer.encode_all([prompt for prompt, _ in texts])
        prompts = [begun(self.tokenizer, prompt) for prompt in encoded]
        answers = self.tokenizer.encode_all([answer for _, answer in texts])
        outputs = self.generate(prompts)
        wrote = [is_answered(o, c) for o, c in zip(outputs, cases, strict=True)]
        chose = self.force(prompts, answers)
        sizes = [p.size + a.size for p, a in zip(prompts, answers, strict=True)]
        rows, first = [], 0
        for cell in cells:
            mine = slice(first, first + len(cell.cases))
            first = mine.stop
            rows.append(
                {
                    "length": cell.length,
                    "depth": cell.depth,
                    "samples": len(cell.cases),
                    "lines": float(np.mean([case.num_lines for case in cell.cases])),
                    "tokens": float(np.mean(sizes[mine])),
                    "generated": float(np.mean(wrote[mine])),
                    "teacher_forced": float(np.mean(chose[mine])),
                }
            )
        return rows


def by_length(rows: Sequence[dict[str, Any]], key: str) -> dict[int, float]:
    """Returns the mean accuracy of each length, over all its cases."""
    lengths = sorted({row["length"] for row in rows})
    return {
        length: float(
            np.average(
                [row[key] for row in rows if row["length"] == length],
                weights=[row["samples"] for row in rows if row["length"] == length],
            )
        )
        for length in lengths
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns accuracy by length as text."""
    generated, forced = (by_length(rows, k) for k in ("generated", "teacher_forced"))
    lines = [f"{'tokens':>10}{'lines':>8}{'generated':>12}{'teacher-forced':>16}"]
    for length, accuracy in generated.items():
        count = np.mean([row["lines"] for row in rows if row["length"] == length])
        lines.append(f"{length:10}{count:8.0f}{accuracy:12.1%}{forced[length]:16.1%}")
    return "\n".join(lines)
