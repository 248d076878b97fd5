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
    """Writes one JSON value, in place of any earlier file."""
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
