"""Directories that appear whole or not at all."""

import shutil
import uuid
from pathlib import Path


class NewDirectory:
    """A hidden sibling of `path`, which takes its name when it is whole.

    index: the file that a corpus at `path` would have; what is there is called one.
    partial: the sibling, empty at first.

    Raises:
      FileExistsError: `path` exists and is not empty; nothing in it is touched.
    """

    def __init__(self, path: Path, index: str | None = None):
        self._path, self._index = path, index
        refuse_existing(path, index)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
        self.partial.mkdir()

    def appear(self) -> None:
        """Gives the sibling its name.

        Raises:
          FileExistsError: another process has made the same since.
        """
        try:
            self.partial.rename(self._path)
        except OSError:
            refuse_existing(self._path, self._index)
            raise

    def remove(self) -> None:
        """Removes the sibling, where it has not appeared."""
        shutil.rmtree(self.partial, ignore_errors=True)


def refuse_existing(directory: Path, index: str | None = None) -> None:
    """Raises FileExistsError if there is something at `directory`.

    index: the file with which it is called a corpus.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    is_corpus = index is not None and (directory / index).exists()
    what = "already holds a corpus" if is_corpus else "already exists"
    raise FileExistsError(
        f"{directory} {what} and is left as it is: remove it or choose another output"
    )
