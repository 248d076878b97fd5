"""What was left out of a corpus, and why: never in silence."""

from dataclasses import dataclass, field

MOST_REASONS = 12
"""Reasons that are listed, the most frequent first."""


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

    def add(self, row: BadRow) -> None:
        """Counts one more."""
        self.counts[row.reason] = self.counts.get(row.reason, 0) + 1
        self.first.setdefault(row.reason, row.where)

    def total(self) -> int:
        return sum(self.counts.values())

    def lines(self, what: str) -> list[str]:
        """Returns a line for each reason: `what`, how many, why, and the first."""
        found = sorted(self.counts.items(), key=lambda item: -item[1])
        lines = [
            f"{what}: {count:,}, {reason}; first {self.first[reason]}"
            for reason, count in found[:MOST_REASONS]
        ]
        rest = found[MOST_REASONS:]
        if rest:
            count = sum(count for _, count in rest)
            lines.append(f"{what}: {count:,}, for {len(rest):,} other reasons")
        return lines


def stop_at(row: BadRow) -> None:
    """Raises ValueError: for those that no row may be bad."""
    raise ValueError(
        f"{row}: mend or remove it, or leave out all such (--bad-rows skip)"
    )


def printable(text: str) -> str:
    """Escapes letters of file names that a terminal would obey, or cannot show."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
