"""Tables of cases in text files: a case a line, beside comments."""

from pathlib import Path


def lines(name: str) -> list[str]:
    text = (Path(__file__).parent / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pairs(name: str, kind: str = "") -> list[tuple[str, str]]:
    """What is wrong, and what is said of it, around an arrow; of the kind before it."""
    before = kind and f"{kind} "
    chosen = (line for line in lines(name) if line.startswith(before))
    return [tuple(line.removeprefix(before).split(" => ", 1)) for line in chosen]
