"""The files that a corpus was made of, and their digests: `sources.jsonl` beside it."""

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from data.versioned import HashedFile, describe_file

SOURCES = "sources.jsonl"
MOST_NAMED = 4
"""Files that are named where a corpus is described; all are in `sources.jsonl`."""


@dataclass
class Sources:
    """How many files a corpus was made of, their size, and the first of them.

    sha256: of `sources.jsonl`, which has path, size and SHA-256 of each in a line.
    """

    files: int = 0
    bytes: int = 0
    sha256: str = ""
    first: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        more = f"; all in {SOURCES}" * (self.files > len(self.first))
        size = f"{self.bytes / 1e6:,.1f} MB"
        return f"files: {self.files:,}, {size}: {', '.join(self.first)}{more}"


def write_sources(directory: Path, paths: Iterable[Path]) -> Sources:
    """Writes `sources.jsonl` in a directory, having read the files."""
    found = Sources()
    with closing(HashedFile(directory / SOURCES)) as written:
        for path in paths:
            facts = describe_file(path)
            written.write((json.dumps({"path": str(path)} | facts) + "\n").encode())
            found.files += 1
            found.bytes += facts["bytes"]
            if found.files <= MOST_NAMED:
                found.first.append(f"{path} (sha256 {facts['sha256'][:12]})")
        found.sha256 = written.described()["sha256"]
    return found
