"""Scores of tasks by length, and what is said of all of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tools.lib.ruler.scores import THRESHOLD, effective_length, score, weighted
from tools.lib.ruler.tasks import TASKS

BINS = 10
"""Of depths, in heat maps."""


def task_row(task: str, length: int, predictions: Sequence[dict[str, Any]]) -> dict:
    """Returns the scores of a task at a length.

    nulls: empty predictions. by_depth: score by tenth of the prompt, None where there
      is no sample; of needles only.
    """
    depths = [row["others"].get("depth") for row in predictions]

    def share(some: Sequence[dict[str, Any]]) -> float | None:
        texts, answers = [r["pred"] for r in some], [r["outputs"] for r in some]
        return score(TASKS[task].match, texts, answers) if some else None

    row = {
        "task": task,
        "length": length,
        "samples": len(predictions),
        "score": share(predictions),
        "nulls": sum(not row["pred"].strip() for row in predictions),
    }
    if task.startswith("niah") and None not in depths:
        bins = np.minimum((np.array(depths) * BINS).astype(int), BINS - 1)
        row["by_depth"] = [
            share([row for row, b in zip(predictions, bins, strict=True) if b == place])
            for place in range(BINS)
        ]
    return row


def heat_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each task of needles, length and depth that has samples."""
    return [
        {
            "run": row["task"],
            "length": row["length"],
            "depth": (place + 0.5) / BINS,
            "generated": found / 100,
        }
        for row in rows
        for place, found in enumerate(row.get("by_depth", ()))
        if found is not None
    ]


def averages(rows: Sequence[dict[str, Any]]) -> dict[int, float]:
    """Returns the mean score of the tasks at each length."""
    lengths = sorted({row["length"] for row in rows})
    return {
        length: float(np.mean([r["score"] for r in rows if r["length"] == length]))
        for length in lengths
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what RULER's table says of a model, and how many tasks it is of."""
    by_length = averages(rows)
    return {
        "tasks": len({row["task"] for row in rows}),
        "by_length": by_length,
        "average": float(np.mean([*by_length.values()])),
        "weighted_to_long": weighted(by_length, towards_long=True),
        "weighted_to_short": weighted(by_length, towards_long=False),
        "effective_length": effective_length(by_length),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns tasks down, lengths across, and the summary, as text.

    A star is beside what is above RULER's threshold.
    """
    found = summary(rows)
    cells = {(row["task"], row["length"]): row["score"] for row in rows}
    lengths = [*found["by_length"]]

    def line(name: str, texts: Iterable[str]) -> str:
        return f"{name:<18}{''.join(f'{text:>11}' for text in texts)}".rstrip()

    lines = [line("tokens", (f"{length:,} " for length in lengths))]
    for task in [task for task in TASKS if any(task == name for name, _ in cells)]:
        scores = (cells.get((task, length)) for length in lengths)
        texts = ("- " if score is None else f"{score:.1f} " for score in scores)
        lines.append(line(task, texts))
    means = found["by_length"].values()
    marks = (f"{mean:.1f}{'*' if mean > THRESHOLD else ' '}" for mean in means)
    lines.append(line("average", marks))
    tasks = found["tasks"]
    whose = "RULER's" if tasks == len(TASKS) else f"of {tasks} of RULER's 13 tasks:"
    effective = found["effective_length"]
    lines += [
        f"{whose} average {found['average']:.1f}, weighted to long "
        f"{found['weighted_to_long']:.1f}, to short {found['weighted_to_short']:.1f}",
        f"effective length: {f'{effective:,} tokens' if effective else 'none'} "
        f"(the longest above {THRESHOLD})",
    ]
    return "\n".join(lines)
