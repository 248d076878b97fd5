"""JSON files that say what lies beside them, and in which version of its format."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.json_text import parse_json, short


def read_versioned(path: Path, version: int, *, what: str, remedy: str) -> dict:
    """Reads the description of a data set.

    version: that this program reads.
    what: the data set, for messages; remedy: what to do about a bad one.

    Raises:
      FileNotFoundError: the file is missing.
      ValueError: it is not a JSON object, has no version, or another one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, so {what}: {remedy}")
    try:
        found: dict[str, Any] = parse_json(path.read_bytes())
        its_version = found["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): {remedy}"
        ) from error
    if type(its_version) is not int or its_version != version:
        raise ValueError(
            f"{path} has format version {short(its_version)}, and this program reads "
            f"version {version}: {remedy}"
        )
    return found


def whole_number(name: str, found: Any, least: int = 0) -> int:
    """Checks a number that a description has to hold.

    Raises:
      ValueError: it is not a whole number, or is below the least.
    """
    if type(found) is not int or found < least:
        given = f"{name}={short(found)}"
        raise ValueError(f"{given} must be a whole number, at least {least}")
    return found


FILES = "files"
"""Key of a description: the bytes and the SHA-256 of each file beside it, by name."""
COMPARED_BYTES = 1 << 28
"""Files of up to this size, together, are always compared with their digests."""


def check_files(
    path: Path, found: Mapping[str, Any], *, whole: bool, remedy: str
) -> str:
    """Compares the files of a data set with their sizes and digests.

    path: of the description. whole: files of any size, and not only small ones.

    Returns:
      What has not been compared, in words; "" where all has.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is not what was written, or the description is damaged.
    """
    if FILES not in found:
        return f"{path.parent} has no digests, of an older program: not compared"
    try:
        files = {
            path.with_name(name): (
                whole_number("bytes", facts["bytes"]),
                str(facts["sha256"]),
            )
            for name, facts in found[FILES].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not describe its {FILES} ({type(error).__name__}: {error}): "
            f"{remedy}"
        ) from error
    for file, (expected, _) in files.items():
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: {remedy}")
        if file.stat().st_size != expected:
            raise ValueError(
                f"{file} has {file.stat().st_size} bytes, but {path.name} says "
                f"{expected}: the file was cut short or replaced; copy it again or "
                f"{remedy}"
            )
    size = sum(expected for expected, _ in files.values())
    if size > COMPARED_BYTES and not whole:
        return (
            f"{path.parent} has {size / 1e9:.1f} GB, which are not compared with their "
            "digests: config.data.compare_digests=True does"
        )
    for file, (_, expected) in files.items():
        if describe_file(file)["sha256"] != expected:
            raise ValueError(
                f"{file} is not what was written, by its digest: it was damaged or "
                f"replaced; copy it again or {remedy}"
            )
    return ""


def describe_file(path: Path) -> dict[str, Any]:
    """Describes a file: its size and SHA-256."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": sha256}


class HashedFile:
    """A new file, and the digest of what is written to it."""

    def __init__(self, path: Path):
        self.path = path
        self._file, self._bytes, self._sha256 = path.open("wb"), 0, hashlib.sha256()

    def write(self, content: bytes) -> None:
        self._bytes += len(content)
        self._sha256.update(content)
        self._file.write(content)

    def described(self) -> dict[str, Any]:
        """Describes all that was written, as `describe_file`."""
        return {"bytes": self._bytes, "sha256": self._sha256.hexdigest()}

    def close(self) -> None:
        self._file.close()


def digest(found: Mapping[str, Any]) -> str:
    """Returns 16 hex digits that are equal only for equal descriptions."""
    text = json.dumps(found, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
