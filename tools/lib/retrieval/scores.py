"""Scores: answers found in texts, rows and a table of them, and RULER's averages."""

import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from data.retrieval.lines import last_integer
from tools.lib.benchmarks.rows import table as rows_as_text

THRESHOLD = 85.6
"""Score of Llama-2-7B at 4096 tokens; a length counts as effective above it."""
BINS = 10
"""Of depths, of RULER's needles."""
PUBLISHED_TASKS = 13
"""Of RULER's table."""

Match = Callable[[str, Sequence[str]], float]
"""From a text and the answers to the share of them that it has, from 0 to 1."""


def match_all(text: str, answers: Sequence[str]) -> float:
    """Returns the share of the answers that stand in the text, in any case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def match_part(text: str, answers: Sequence[str]) -> float:
    """Returns 1 if any of the answers stands in the text, in any case, and else 0."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def match_line(text: str, answers: Sequence[str]) -> float:
    """Returns 1 if the last integer of the first line is the answer's, and else 0.

    A model that only goes on with a text will not stop at the line's end.
    """
    line = text.strip().partition("\n")[0]
    return float(last_integer(line) == last_integer(answers[0]))


def score(
    match: Match, texts: Sequence[str], answers: Sequence[Sequence[str]]
) -> float:
    """Returns RULER's mean over samples, times 100, in hundredths.

    Control characters of a text end lines, and its ends are bare.
    """
    cleaned = (re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip() for text in texts)
    return round(sum(map(match, cleaned, answers)) / len(texts) * 100, 2)


def task_row(
    task: str, length: int, match: Match, predictions: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the scores of a task at a length.

    nulls: empty predictions. by_depth: pairs of a depth and its score, of needles by
      tenths of the prompt, of lines by those that are asked for; not of other tasks.
    """

    def share(rows: Sequence[dict[str, Any]]) -> float:
        texts = [row["pred"] for row in rows]
        return score(match, texts, [row["outputs"] for row in rows])

    row = {"task": task, "length": length, "samples": len(predictions)}
    row["score"] = share(predictions)
    row["nulls"] = sum(not row["pred"].strip() for row in predictions)
    depths: dict[float, list[dict[str, Any]]] = {}
    for prediction in predictions if task.startswith(("niah", "lines")) else ():
        depth = prediction["others"]["depth"]
        if task != "lines":
            depth = (min(int(depth * BINS), BINS - 1) + 0.5) / BINS
        depths.setdefault(depth, []).append(prediction)
    if depths:
        row["by_depth"] = [[depth, share(depths[depth])] for depth in sorted(depths)]
    return row


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what RULER's table says of a model, and how many tasks it is of.

    Weights are 1, 2, … towards long lengths, or the other way round. The effective
    length is the largest with a score above the threshold, None without one.
    """
    lengths = sorted({row["length"] for row in rows})
    means = {}
    for length in lengths:
        means[length] = fmean(row["score"] for row in rows if row["length"] == length)
    scores = list(means.values())
    weights = np.arange(1, len(means) + 1)
    effective = [length for length in lengths if means[length] > THRESHOLD]
    return {
        "tasks": len({row["task"] for row in rows}),
        "by_length": means,
        "average": float(np.mean(scores)),
        "weighted_to_long": float(np.average(scores, weights=weights)),
        "weighted_to_short": float(np.average(scores, weights=weights[::-1])),
        "effective_length": max(effective, default=None),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the tasks down, lengths across, and the summary, as text.

    A star is beside what is above RULER's threshold.
    """
    summed = summary(rows)
    means = summed["by_length"]
    texts = {"tokens": [f"{length:,} " for length in means]}
    for row in rows:
        of_task = texts.setdefault(row["task"], ["- "] * len(means))
        of_task[[*means].index(row["length"])] = f"{row['score']:.1f} "
    texts["average"] = [f"{m:.1f}{' *'[m > THRESHOLD]}" for m in means.values()]
    lines = []
    for name, cells in texts.items():
        lines.append((f"{name:<18}" + "".join(map("{:>11}".format, cells))).rstrip())
    lines.append(
        f"tasks: {summed['tasks']} (RULER's table has {PUBLISHED_TASKS}); average "
        f"{summed['average']:.1f}, weighted to long "
        f"{summed['weighted_to_long']:.1f}, to short "
        f"{summed['weighted_to_short']:.1f}"
    )
    effective = summed["effective_length"]
    longest = f"{effective:,} tokens" if effective else "none"
    lines.append(f"effective length: {longest} (the longest above {THRESHOLD})")
    return "\n".join(lines)


def depths(rows: Sequence[dict[str, Any]]) -> str:
    """Returns scores by depth of the tasks that have some, lengths across, as text."""
    shown: dict[tuple[str, float], dict[str, Any]] = {}
    lengths = set()
    for row in rows:
        for depth, share in row.get("by_depth", ()):
            first = {"task": row["task"], "depth": depth, "of": {}}
            of_depth = shown.setdefault((row["task"], depth), first)
            of_depth["of"][row["length"]] = share
            lengths.add(row["length"])
    columns = {"task": "{task}", "depth": "{depth:.0%}"}
    for length in sorted(lengths):
        columns[f"{length:,}"] = f"{{of[{length}]:.1f}}"
    return rows_as_text(list(shown.values()), columns) if shown else ""
