"""JSON files that say what lies beside them, and in which version of its format."""

import json
from pathlib import Path
from typing import Any


def read_versioned(path: Path, version: int, *, what: str, remedy: str) -> dict:
    """Reads the description of a data set.

    version: that this program reads.
    what: the data set, for messages; remedy: what to do about a bad one.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no JSON object, has no version, or another one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, so {what}: {remedy}")
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        its_version = found["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): {remedy}"
        ) from error
    if its_version != version:
        raise ValueError(
            f"{path} has format version {its_version}, and this program reads version "
            f"{version}: {remedy}"
        )
    return found
