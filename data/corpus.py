"""Writes text files, directories and `.jsonl` files as token files.

A file is one document, a directory is all files in it and below, and a `.jsonl` file
has one document a line. Every document is followed by the tokenizer's end-of-document
token, and preceded by the one that begins texts, if it has that. Which documents are
held out for validation depends on what they say and on nothing else, so copies of one
text never come to lie on both sides.
"""

import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.holdout import Holdout
from data.json_text import parse_json
from data.token_file import SPLITS, SplitCounts, TokenFile, TokenFileWriter
from data.tokenizer import ByteTokenizer, Tokenizer, begun

# Encoded together: enough for every core, and little enough to hold in memory.
DOCUMENTS_AT_A_TIME = 64
# Parts of Python's installation that are not its library, or only its tests.
NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}


@dataclass(frozen=True)
class Summary:
    """Figures of a prepared corpus.

    counts: documents and tokens of each split.
    bytes_per_token: of the token files.
    not_text, empty: files skipped because they are not UTF-8 text, and documents
      skipped because there is nothing in them.
    """

    output: Path
    counts: dict[str, SplitCounts]
    bytes_per_token: int
    not_text: int
    empty: int

    def __str__(self) -> str:
        lines = []
        for split, counts in self.counts.items():
            size = counts.tokens * self.bytes_per_token / 1e6
            lines.append(
                f"{split:<10} {counts.documents:>11,} documents "
                f"{counts.tokens:>15,} tokens {size:>10,.1f} MB"
            )
        lines.append(
            f"skipped: {self.not_text:,} files that are not UTF-8 text, "
            f"{self.empty:,} empty documents"
        )
        return "\n".join([*lines, f"written to {self.output}"])


@dataclass
class _Survey:
    """Figures from a first reading of all documents."""

    characters: int = 0
    not_text: int = 0
    empty: int = 0


def prepare(
    inputs: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    *,
    validation_fraction: float = 0.02,
    pattern: str = "*",
    text_field: str = "text",
) -> Summary:
    """Writes the corpus `output` from text files, directories and `.jsonl` files.

    Documents are read twice, one after the other and never all at once: all of them are
    checked, and counted, before the first is encoded.

    Args:
      inputs: files and directories; hidden files in a directory are left out.
      output: a directory that does not exist yet, or is empty.
      tokenizer: makes the tokens.
      validation_fraction: about this share of the documents is held out, and at least
        one (and never all) where two documents differ.
      pattern: which files of a directory are read.
      text_field: which field of a `.jsonl` line is the document.

    Raises:
      FileNotFoundError: an input does not exist.
      FileExistsError: `output` exists and is not empty.
      ValueError: a line of a `.jsonl` file is bad, there is no text in the inputs, or
        the fraction is not between 0 and 1.
    """
    holdout = Holdout(validation_fraction)
    paths = _paths(inputs, pattern)
    with TokenFileWriter(output, tokenizer) as writer:
        survey = _survey(_documents(paths, text_field), holdout)
        if not survey.characters:
            raise ValueError(
                f"there is no text in {', '.join(map(str, inputs))}: of {len(paths)} "
                f"files that match {pattern!r}, {survey.not_text} are not UTF-8 text; "
                f"{survey.empty} documents are empty"
            )
        progress = _progress("encoding", survey.characters)
        with progress:
            documents = _documents(paths, text_field)
            _encode(documents, writer, tokenizer, holdout, progress)
    return Summary(
        output, writer.counts, writer.bytes_per_token, survey.not_text, survey.empty
    )


def prepare_standard_library(output: Path) -> Path:
    """Writes a corpus of the running Python's standard library, byte by byte.

    About 12 MB that every machine has. A corpus that is already there is kept.

    Returns:
      `output`.

    Raises:
      ValueError, FileNotFoundError: what is there already is damaged, or holds tokens
        that are not bytes.
      FileExistsError: `output` is something else than a corpus.
    """
    if not (output / "meta.json").exists():
        try:
            prepare(standard_library_files(), output, ByteTokenizer())
        except FileExistsError:
            # Another process of the same run may have been faster.
            if not (output / "meta.json").exists():
                raise
    for split in SPLITS:
        corpus = TokenFile.open(output, split)
        if corpus.tokenizer != ByteTokenizer.name:
            raise ValueError(
                f"{output} was made with tokenizer {corpus.tokenizer}, not from bytes: "
                "choose another directory for the standard library"
            )
    return output


def standard_library_files() -> list[Path]:
    """Returns the sources of the running Python's standard library, sorted."""
    library = Path(sysconfig.get_paths()["stdlib"])
    return [
        path
        for path in _files_in(library, "*.py")
        if NOT_LIBRARY.isdisjoint(path.relative_to(library).parts)
    ]


def _paths(inputs: Sequence[Path], pattern: str) -> list[Path]:
    paths = []
    for path, times in Counter(inputs).items():
        if times > 1:
            raise ValueError(f"input {path} is given {times} times: name it once")
        if path.is_dir():
            paths += _files_in(path, pattern)
        elif path.is_file():
            paths.append(path)
        elif path.exists():
            raise ValueError(
                f"input {path} must be a file or a directory: inputs are read twice, "
                "so save what a pipe gives in a file"
            )
        else:
            raise FileNotFoundError(f"input {path} does not exist")
    return paths


def _files_in(directory: Path, pattern: str) -> list[Path]:
    """Lists files below the directory, sorted, so in one order on every machine."""

    def is_hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(directory).parts)

    try:
        found = [path for path in directory.rglob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"pattern={pattern!r} must match files below a directory, as '*.txt' and "
            f"'notes/*.md' are: {error}"
        ) from error
    return sorted(path for path in found if not is_hidden(path))


def _documents(paths: Sequence[Path], text_field: str) -> Iterator[str | None]:
    """Yields texts, one a document; None for a file that is not text."""
    for path in paths:
        if path.suffix == ".jsonl":
            yield from _json_lines(path, text_field)
        else:
            yield _text(path.read_bytes())


def _text(content: bytes) -> str | None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    # No text has the zero byte, and many binary files that decode by chance do.
    return None if "\0" in text else text


def _json_lines(path: Path, text_field: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = parse_json(line)[text_field]
                text.encode("utf-8")  # JSON can spell half a surrogate pair
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise ValueError(
                    f"{path}:{number}: not a JSON object whose field {text_field!r} is "
                    f"a text ({type(error).__name__}: {error}): mend or remove the line"
                ) from error
            yield text


def _progress(what: str, total: int | None) -> tqdm:
    """Makes a progress bar, silent where standard error is not a terminal."""
    return tqdm(
        desc=what, total=total, unit=" characters", unit_scale=True, disable=None
    )


def _survey(documents: Iterator[str | None], holdout: Holdout) -> _Survey:
    survey = _Survey()
    with _progress("reading", None) as progress:
        for text in documents:
            if text is None:
                survey.not_text += 1
            elif not text:
                survey.empty += 1
            else:
                holdout.add(text)
                survey.characters += len(text)
                progress.update(len(text))
    return survey


def _encode(
    documents: Iterator[str | None],
    writer: TokenFileWriter,
    tokenizer: Tokenizer,
    holdout: Holdout,
    progress: tqdm,
) -> None:
    for texts in batched(filter(None, documents), DOCUMENTS_AT_A_TIME):
        for text, ids in zip(texts, tokenizer.encode_all(texts), strict=True):
            end = np.int32(tokenizer.end_of_document)
            writer.write(holdout.split(text), np.append(begun(tokenizer, ids), end))
            progress.update(len(text))
