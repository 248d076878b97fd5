"""Files that are there whole or not at all."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path, which becomes `path` when the block ends.

    After an exception there is what was there before.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Writes one JSON value, a row or an array a line, in place of any earlier file."""
    with replacing(path) as part:
        part.write_text(_as_json(value) + "\n", encoding="utf-8")


def _as_json(value: Any, margin: str = "\n") -> str:
    """Returns JSON in which what holds objects or arrays is indented, and no other.

    margin: a line's end, and the blanks that the next one begins with.
    """
    if not isinstance(value, dict | list | tuple):
        return json.dumps(value)
    parts = value.values() if isinstance(value, dict) else value
    if not any(isinstance(part, dict | list | tuple) for part in parts):
        return json.dumps(value)
    inner = f"{margin} "
    if isinstance(value, dict):
        # A name as `json` writes it, which need not be a string.
        names = [json.dumps({name: 0})[1:-2] for name in value]
        texts = [_as_json(item, inner) for item in value.values()]
        lines = [name + text for name, text in zip(names, texts, strict=True)]
        return f"{{{inner}{f',{inner}'.join(lines)}{margin}}}"
    lines = [_as_json(item, inner) for item in value]
    return f"[{inner}{f',{inner}'.join(lines)}{margin}]"
