"""The files that the inputs of a corpus are: which are read, and for which split.

A directory stands for all files in it and below, except hidden ones, each read by its
kind. A folder in it is a data set of Hugging Face if it has tables, also below it, and
a file of their library or hub: `DATA_SET_FILES`, or a `README.md` with a head of YAML.
Of a data set only the tables are read: `data/train-00000-of-00002.parquet`, or those of
`save_to_disk`.

Files of rows whose names, or folders, say which split they hold are of that split; of
all others, what each document says decides whether it is held out.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.remote import reach
from data.text.reading.row_files import (
    FORMATS,
    TABLES,
    InputFile,
    check_beginning,
    ending,
)
from data.text.reading.skipped import BadRow, Skipped

EVERY_FILE = "*"
TRAIN = "train"
HELD_OUT = ("validation", "test")
# What data sets call their splits, and what we do.
SPLIT_NAMES = {
    "train": TRAIN,
    "training": TRAIN,
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
SPLIT_NAME = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_NAMES)})(?![a-z])")
SHARD = re.compile(r"(?P<name>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(?!\d)")
DICTIONARY = "dataset_dict.json"
"""File of `save_to_disk` beside the folders, each with a split."""
DATA_SET_FILES = (DICTIONARY, "dataset_info.json", "dataset_infos.json")
CARD = "README.md"
CARD_BEGINNING = b"---"


@dataclass(frozen=True)
class Inputs:
    """The files of a corpus, in their order, and those that are left out."""

    files: Sequence[InputFile]
    left_out: Skipped

    def lines(self) -> list[str]:
        """Returns lines about their splits, and about the files left out."""
        counts = Counter(file.split for file in self.files)
        splits = f"{counts['train']:,} files, held out: {counts['validation']:,}"
        named = [f"trained on, by their names: {splits}"] * bool(counts["validation"])
        return named + self.left_out.lines("left out")


def list_inputs(
    inputs: Sequence[Path], *, pattern: str = EVERY_FILE, splits: Sequence[str] = ()
) -> Inputs:
    """Lists the files of the inputs.

    Args:
      inputs: files and directories.
      pattern: which files of a directory are read.
      splits: names of the split to train on and, if there is one, of that to hold out;
        files of others are left out. (): "train", and "validation" or else "test".

    Raises:
      FileNotFoundError: an input, or a part of a data set, does not exist.
      ValueError: an input is given twice, is neither file nor directory, or not what it
        is called; a split is missing, or the one to train on is not known.
    """
    if len(splits) > 2 or len({*splits}) < len(splits) or "" in splits:
        raise ValueError(
            f"splits {','.join(splits)} must be TRAIN or TRAIN,HELD_OUT, two names"
        )
    _check_inputs(inputs)
    left_out = Skipped()
    named = [path for path in inputs if path.is_file()]
    split_of_named = _assign(None, named, splits, left_out)
    files: list[InputFile] = []
    for path in inputs:
        if path.is_dir():
            inside = files_in(path, pattern)
            if pattern == EVERY_FILE:
                inside = _data(inside, left_out)
            split_of = _assign(path, inside, splits, left_out)
            files += [InputFile(file, split, False) for file, split in split_of.items()]
        elif path in split_of_named:
            files.append(InputFile(path, split_of_named[path], True))
    for file in files:
        check_beginning(file.path)
    return Inputs(files, left_out)


def _check_inputs(inputs: Sequence[Path]) -> None:
    for path, times in Counter(inputs).items():
        if times > 1:
            raise ValueError(f"input {path} is given {times} times: name it once")
        reach(path)
        if not path.exists():
            raise FileNotFoundError(f"input {path} does not exist")
        if not path.is_dir() and not path.is_file():
            raise ValueError(
                f"input {path} must be a file or a directory: inputs are read twice, "
                "so save what a pipe gives in a file"
            )


def files_in(directory: Path, pattern: str) -> list[Path]:
    """Lists files below the directory, sorted, so in one order on every machine."""
    try:
        files = [path for path in directory.rglob(pattern) if path.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise ValueError(
            f"pattern={pattern!r} must match files below a directory, as '*.txt' and "
            f"'notes/*.md' are: {error}"
        ) from error
    return sorted(path for path in files if not _is_hidden(path, directory))


def _is_hidden(path: Path, directory: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(directory).parts)


def _is_table(path: Path) -> bool:
    return ending(path) in TABLES


def _data(files: Sequence[Path], left_out: Skipped) -> list[Path]:
    """Returns the files of a directory, but of data sets only the tables.

    Raises:
      FileNotFoundError: a data set lacks a file.
    """
    tables = [*filter(_is_table, files)]
    with_tables = {folder for path in tables for folder in path.parents}
    described = {path.parent for path in files if _describes_data_set(path)}
    data_sets = with_tables & described
    kept = []
    for path in files:
        if _is_table(path) and path.name.startswith("cache-"):
            left_out.add(BadRow(str(path), "cache of a data set"))
        elif _is_table(path) or data_sets.isdisjoint(path.parents):
            kept.append(path)
        else:
            kind = path.suffix or "without an ending"
            left_out.add(BadRow(str(path), f"{kind}, beside the tables of a data set"))
    _check_shards([*filter(_is_table, kept)])
    return kept


def _describes_data_set(path: Path) -> bool:
    """Returns whether a file says that its folder is a data set of Hugging Face."""
    if path.name != CARD:
        return path.name in DATA_SET_FILES
    with path.open("rb") as file:
        return file.read(len(CARD_BEGINNING)) == CARD_BEGINNING


def _check_shards(files: Sequence[Path]) -> None:
    """Raises FileNotFoundError if a shard is missing beside those that are there."""
    numbers: dict[tuple[Path, str, str], set[int]] = {}
    for path in files:
        # Behind its number a shard may have a digest of its own.
        shard = SHARD.match(path.name)
        if shard:
            shards = (path.parent, shard["name"], shard["count"])
            numbers.setdefault(shards, set()).add(int(shard["number"]))
    missing = []
    for (folder, name, count), present in sorted(numbers.items()):
        for number in sorted({*range(int(count))} - present):
            missing.append(f"{folder / name}-{number:05}-of-{count}")
    if missing:
        raise FileNotFoundError(
            f"{missing[0]} is missing, of {len(missing)} files of a data set: copy it "
            "again, or name the files to read (--pattern)"
        )


def _assign(
    directory: Path | None,
    files: Sequence[Path],
    splits: Sequence[str],
    left_out: Skipped,
) -> dict[Path, str | None]:
    """Returns the files that are read, and the split of each (see `InputFile`)."""
    named = {p: _split_name(p, directory) for p in files if ending(p) in FORMATS}
    names = sorted({*filter(None, named.values())})
    if splits and named:
        missing = {*splits}.difference(names)
        if missing:
            raise ValueError(
                f"there is no split {', '.join(sorted(missing))} in "
                f"{directory or named.popitem()[0]}, but "
                f"{', '.join(names) or 'files whose names say none'}"
            )
        train = [splits[0]]
        held_out = splits[1:]
    else:
        if TRAIN not in names:
            # Files of code and of other texts have such names by chance.
            named = {path: name for path, name in named.items() if _is_table(path)}
            names = sorted({*filter(None, named.values())})
            if len({*named.values()}) < 2:
                return dict.fromkeys(files)
        train = [TRAIN, None]
        held_out = [name for name in HELD_OUT if name in names][:1]
        if TRAIN not in names and None not in named.values():
            raise ValueError(
                f"{directory or 'the inputs'} has splits {', '.join(names)}: "
                "say which to train on, and which to hold out, as in --splits "
                f"{','.join(names[:2])}"
            )
    assigned: dict[Path, str | None] = {}
    for path in files:
        if path not in named or named[path] in train and not held_out:
            assigned[path] = None
        elif named[path] in (*train, *held_out):
            assigned[path] = "train" if named[path] in train else "validation"
        else:
            left_out.add(BadRow(str(path), f"of split {named[path] or '(none)'}"))
    return assigned


def _split_name(path: Path, directory: Path | None) -> str | None:
    """Returns the split that a file's name says it holds, or the folder that it is in.

    By the rules of Hugging Face's library; None: none.
    """
    shard = SHARD.match(path.name)
    name = shard["name"] if shard else path.name.lower()
    if shard and name == "data":
        is_split = (path.parent.parent / DICTIONARY).is_file()
        return path.parent.name if is_split else None
    if shard:  # `train`, and any other; a cache's begin with the data set's
        return SPLIT_NAMES.get(name.rsplit("-")[-1], name)
    folders = path.relative_to(directory).parts[:-1] if directory else ()
    known = [folder for folder in folders if folder in SPLIT_NAMES]
    known += SPLIT_NAME.findall(name)
    return SPLIT_NAMES[known[-1]] if known else None
