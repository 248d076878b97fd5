"""What was left out of a corpus, or looks like no words, and why: never in silence.

A model learns markup as if it were words. That may be meant, as of a corpus of web
pages or of code: it is reported, and ends nothing.
"""

import json
import re
from dataclasses import dataclass, field

MOST_REASONS = 12
"""Reasons that are listed, the most frequent first."""
MOST_REPORTED = 20
"""Skipped rows that are named one by one."""
SPECIAL = "names of special tokens, as <|im_start|>"
TAGS = "HTML or XML"
JSON = "JSON"

# Tokens of OpenAI, Meta, Alibaba and Microsoft have names between "<|" and "|>"; the
# other names are of Llama 2, Mistral and Gemma.
_SPECIAL = re.compile(
    r"<\|[a-z_]{2,30}\|>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
)
_PARTS = "<|", "INST]", "SYS>>", "_of_turn>"  # of names, that are found fast
_TAGS = re.compile(r"\s*<(?:!doctype html|html|\?xml|svg)\b", re.IGNORECASE)


@dataclass(frozen=True)
class BadRow:
    """A row, or a file, that cannot be used: where it is, and the reason.

    is_error: whether it ends a program that was not told to skip bad rows.
    """

    where: str
    reason: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{printable(self.where)}: {self.reason}"


@dataclass
class Skipped:
    """Counts by reason, and where each was found first."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, row: BadRow, count: int = 1) -> None:
        """Counts one more, or as many as there are in a row."""
        self.counts[row.reason] = self.counts.get(row.reason, 0) + count
        self.first.setdefault(row.reason, row.where)

    def __add__(self, behind: "Skipped") -> "Skipped":
        counts = dict(self.counts)
        for reason, count in behind.counts.items():
            counts[reason] = counts.get(reason, 0) + count
        return Skipped(counts, behind.first | self.first)

    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self, what: str) -> list[str]:
        """Returns a line for each reason: `what`, how many, why, and the first."""
        reasons = sorted(self.counts, key=lambda reason: -self.counts[reason])
        lines = []
        for reason in reasons[:MOST_REASONS]:
            count = self.counts[reason]
            lines.append(f"{what}: {count:,}, {reason}; first {self.first[reason]}")
        rest = reasons[MOST_REASONS:]
        if rest:
            count = sum(self.counts[reason] for reason in rest)
            lines.append(f"{what}: {count:,}, for {len(rest):,} other reasons")
        return lines


def printable(text: str) -> str:
    """Escapes letters of file names that a terminal would obey, or cannot show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def find_markup(text: str) -> str | None:
    """Returns the kind of a text's markup; None: none."""
    if names_special_tokens(text):
        return SPECIAL
    if _TAGS.match(text):
        return TAGS
    return JSON if text.lstrip()[:1] in ("{", "[") and _is_json(text) else None


def names_special_tokens(text: str) -> bool:
    """Returns whether a text has the name of a special token, as <|im_start|>."""
    has_part = any(part in text for part in _PARTS)
    return has_part and _SPECIAL.search(text) is not None


def _is_json(text: str) -> bool:
    """Returns whether it is a JSON value, or has one in its first line."""
    for part in (text, text.lstrip().split("\n", 1)[0]):
        try:
            return isinstance(json.loads(part), dict | list)
        except (ValueError, RecursionError):
            continue
    return False
