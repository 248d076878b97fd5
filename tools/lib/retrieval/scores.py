"""Scores: answers found in texts, the rows and tables of them, and RULER's averages."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from data.retrieval.lines import last_integer

THRESHOLD = 85.6
"""Score of Llama-2-7B at 4096 tokens; a length counts as effective above it."""
BINS = 10
"""Of depths, in heat maps of RULER's needles."""
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
    """Returns the scores of a task of RULER at a length.

    nulls: empty predictions. by_depth: score by tenth of the prompt, None where there
      is no sample; of needles only.
    """
    depths = [row["others"].get("depth") for row in predictions]

    def share(some: Sequence[dict[str, Any]]) -> float | None:
        texts, answers = [r["pred"] for r in some], [r["outputs"] for r in some]
        return score(match, texts, answers) if some else None

    row = {"task": task, "length": length, "samples": len(predictions)}
    row["score"] = share(predictions)
    row["nulls"] = sum(not row["pred"].strip() for row in predictions)
    if task.startswith("niah") and None not in depths:
        bins: list[list[dict[str, Any]]] = [[] for _ in range(BINS)]
        for prediction, depth in zip(predictions, depths, strict=True):
            bins[min(int(depth * BINS), BINS - 1)].append(prediction)
        row["by_depth"] = [share(some) for some in bins]
    return row


def heat_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a row for each task of needles, length and depth that has samples."""
    return [
        {"run": row["task"], "length": row["length"], "depth": (place + 0.5) / BINS}
        | {"generated": found / 100}
        for row in rows
        for place, found in enumerate(row.get("by_depth", ()))
        if found is not None
    ]


def by_length(
    rows: Sequence[dict[str, Any]], key: str, weight: str = ""
) -> dict[int, float]:
    """Returns the mean of a field over the rows of each length, by a weight if any."""
    means = {}
    for length in sorted({row["length"] for row in rows}):
        mine = [row for row in rows if row["length"] == length]
        weights = [row[weight] if weight else 1 for row in mine]
        means[length] = float(np.average([r[key] for r in mine], weights=weights))
    return means


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what RULER's table says of a model, and how many tasks it is of.

    Weights are 1, 2, … towards long lengths, or the other way round. The effective
    length is the largest with a score above the threshold, None without one.
    """
    means = by_length(rows, "score")
    scores, weights = [*means.values()], np.arange(1, len(means) + 1)
    return {
        "tasks": len({row["task"] for row in rows}),
        "by_length": means,
        "average": float(np.mean(scores)),
        "weighted_to_long": float(np.average(scores, weights=weights)),
        "weighted_to_short": float(np.average(scores, weights=weights[::-1])),
        "effective_length": max(
            (n for n in means if means[n] > THRESHOLD), default=None
        ),
    }


def _grid(lengths: Iterable[int], lines: Mapping[str, Iterable[str]]) -> list[str]:
    """Returns lines of names, with a text at each length."""
    head = {"tokens": [f"{length:,} " for length in lengths]}
    return [
        f"{name:<18}{''.join(f'{text:>11}' for text in texts)}".rstrip()
        for name, texts in (head | {**lines}).items()
    ]


def line_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns lines and accuracies by length, as text."""
    lines = by_length(rows, "lines")
    texts = {"lines": [f"{count:.0f} " for count in lines.values()]}
    for key in ("generated", "teacher_forced"):
        shares = by_length(rows, key, weight="samples").values()
        texts[key.replace("_", "-")] = [f"{share:.1%}" for share in shares]
    return "\n".join(_grid(lines, texts))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns RULER's tasks down, lengths across, and the summary, as text.

    A star is beside what is above RULER's threshold.
    """
    found = summary(rows)
    means, tasks, effective = (
        found[name] for name in ("by_length", "tasks", "effective_length")
    )
    texts = {row["task"]: ["- "] * len(means) for row in rows}
    for row in rows:
        texts[row["task"]][[*means].index(row["length"])] = f"{row['score']:.1f} "
    stars = [" *"[mean > THRESHOLD] for mean in means.values()]
    texts["average"] = [
        f"{m:.1f}{s}" for m, s in zip(means.values(), stars, strict=True)
    ]
    of_all = f"of {tasks} of RULER's {PUBLISHED_TASKS} tasks:"
    whose = "RULER's" if tasks == PUBLISHED_TASKS else of_all
    lines = _grid(means, texts)
    lines.append(
        f"{whose} average {found['average']:.1f}, weighted to long "
        f"{found['weighted_to_long']:.1f}, to short {found['weighted_to_short']:.1f}"
    )
    lines.append(
        f"effective length: {f'{effective:,} tokens' if effective else 'none'} "
        f"(the longest above {THRESHOLD})"
    )
    return "\n".join(lines)
