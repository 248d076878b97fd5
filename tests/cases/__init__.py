"""Tables of cases in text files: a case a line, beside comments."""

from pathlib import Path


def lines(name: str) -> list[str]:
    text = (Path(__file__).parent / name).read_text()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pairs(name: str) -> list[tuple[str, str]]:
    """What is wrong, and what is said of it, around an arrow."""
    return [tuple(line.split(" => ", 1)) for line in lines(name)]
