"""Scores as RULER has them: answers found in texts, averages, the effective length."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

THRESHOLD = 85.6
"""Score of Llama-2-7B at 4096 tokens; a length counts as effective above it."""

Match = Callable[[str, Sequence[str]], float]


def cleaned(text: str) -> str:
    """Returns a text as it is compared: control characters end lines, ends are bare."""
    return re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip()


def match_all(text: str, answers: Sequence[str]) -> float:
    """Returns the share of the answers that stand in the text, in any case."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def match_part(text: str, answers: Sequence[str]) -> float:
    """Returns 1 if any of the answers stands in the text, in any case, and else 0."""
    return float(any(answer.lower() in text.lower() for answer in answers))


def score(
    match: Match, texts: Sequence[str], answers: Sequence[Sequence[str]]
) -> float:
    """Returns the mean over samples, times 100, in hundredths."""
    pairs = zip(map(cleaned, texts), answers, strict=True)
    return round(sum(match(*pair) for pair in pairs) / len(texts) * 100, 2)


def effective_length(scores: Mapping[int, float]) -> int | None:
    """Returns the largest length with a score above the threshold; None if none."""
    return max((n for n, score in scores.items() if score > THRESHOLD), default=None)


def weighted(scores: Mapping[int, float], towards_long: bool) -> float:
    """Returns the mean over lengths, with weights 1, 2, … or the other way round."""
    ordered = [scores[length] for length in sorted(scores)]
    weights = np.arange(1, len(ordered) + 1)
    return float(
        np.average(ordered, weights=weights if towards_long else weights[::-1])
    )
