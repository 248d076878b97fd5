"""Files of every format: which are read, alike and in bounded memory, or refused."""

import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from data import json_text
from data.json_text import parse_json, read_json_object
from data.text.corpus import prepare
from data.text.reading import row_files
from data.text.reading.input_files import list_inputs
from data.text.reading.row_files import InputFile, read_documents, read_rows
from data.text.reading.skipped import BadRow
from data.text.tokens.tokenizer import ByteTokenizer
from tests.cases import table
from tests.support import tables
from tests.support.fuzzing import damaged, fuzz

# Texts with what formats have to quote, and one longer than a block of any reader.
TEXTS = ['Möwen, 3"\n\tfly\r\n', "a", " ", "\u2028 \\n 'x'", "[1]", "long " * 50_000]
TEXTS += [f"text {number} " * (number % 9 + 1) for number in range(150)]
ROWS = [{"id": i, "text": t, "other": f"{i}, no text"} for i, t in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Token files of the texts, each in a file of its own."""
    root = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXTS):
        (root / f"{number:04}.txt").write_bytes(text.encode())
    return made(root, root / "corpus")


def made(source, output):
    prepare([source], output, ByteTokenizer(), validation_fraction=0.1)
    return {path.name: path.read_bytes() for path in output.glob("*.bin")}


@pytest.mark.parametrize("name", tables.FORMATS)
def test_the_same_texts_are_the_same_corpus_in_every_format(tmp_path, name, expected):
    source = tables.compress(tmp_path / name, tables.FORMATS[name](ROWS))
    assert made(source, tmp_path / "out") == expected


def test_data_sets_of_shards_are_the_same_corpus(tmp_path, expected):
    tables.save_to_disk(tmp_path / "disk", ROWS)
    tables.save_on_hub(tmp_path / "hub", {"train": ROWS})
    for name in "disk", "hub":
        assert made(tmp_path / name, tmp_path / f"{name}-out") == expected


@pytest.mark.parametrize("codec", [".gz", ".zst"])
def test_texts_may_be_compressed(tmp_path, codec):
    (tmp_path / "in").mkdir()
    for number in range(4):
        path = tmp_path / "in" / f"{number}.txt{codec}"
        tables.compress(path, f"text {number}".encode())
    # Two frames, or members, as of files that were joined.
    path.write_bytes(path.read_bytes() * 2)
    out = made(tmp_path / "in", tmp_path / "out")
    assert b"".join(out.values()).count("t".encode("utf-16-le")) == 2 * 5


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.feather"])
def test_conversations_of_tables_are_lists_of_objects(tmp_path, name):
    rows = [{"messages": [{"role": "user", "content": "Hi", "name": None}]}] * 3
    source = tables.compress(tmp_path / name, tables.FORMATS[name](rows))
    found = list(read_rows(source, ["messages", "tools"]))
    assert found == [(f"{source}[{number}]", rows[0]) for number in range(3)]


def peak_of_reading(source):
    """Most bytes that Python and pyarrow hold at a time while rows are read."""
    before, arrow = pa.total_allocated_bytes(), 0
    tracemalloc.start()
    for _ in read_rows(source, ["text"]):
        arrow = max(arrow, pa.total_allocated_bytes() - before)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak + arrow


def random_texts(count):
    rng = np.random.default_rng(5)
    return [{"text": rng.bytes(1000).hex()} for _ in range(count)]


@pytest.mark.thorough(quick=4)
@pytest.mark.parametrize(
    "name", [n for n in tables.FORMATS if "rows.json." not in f"{n}."]
)
def test_memory_does_not_grow_with_the_file(tmp_path, name):
    peaks = []
    for count in (300, 1200):
        content = tables.FORMATS[name](random_texts(count))
        peaks.append(peak_of_reading(tables.compress(tmp_path / name, content)))
    assert peaks[1] < 1.2 * peaks[0] + (1 << 16) and peaks[0] < 3 << 19, peaks


def test_of_a_group_of_rows_few_are_held_at_a_time(tmp_path):
    """A row group is read page by page; of a record batch few rows are Python's."""
    content = tables.as_parquet(random_texts(12_000), row_group_size=1 << 20)
    assert len(content) > 22 << 20
    source = tables.compress(tmp_path / "rows.parquet", content)
    assert peak_of_reading(source) < 9 << 20
    content = tables.as_arrow(random_texts(3000), batch=1 << 20)
    source = tables.compress(tmp_path / "rows.arrow", content)
    assert peak_of_reading(source) < 1.1 * len(content)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.feather"])
def test_a_long_value_of_many_rows_is_held_once(tmp_path, name):
    """A file of few bytes has 64 rows of 1 MiB, all of one entry of a dictionary."""
    values = pa.array(["x" * (1 << 20)] * 64).dictionary_encode()
    texts, source = pa.table({"text": values}), tmp_path / name
    if name == "rows.parquet":
        parquet.write_table(texts, source, compression="zstd")
    else:
        kind = ipc.new_file if name == "rows.feather" else ipc.new_stream
        with kind(source, texts.schema) as writer:
            writer.write_table(texts)
    assert peak_of_reading(source) < 9 << 20


def test_names_that_stand_twice_are_found_in_one_pass():
    """The first of them is named, in a large object too."""
    compared = []

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            compared.append(other)
            return str.__eq__(self, other)

    names = [Name(number) for number in range(2000)]
    pairs = [(name, 0) for name in (*names, Name("1999"), Name("1998"))]
    with pytest.raises(ValueError, match=r"^'1998' stands twice in an object$"):
        json_text._object(pairs)
    assert len(compared) < 9 * len(names)


@pytest.mark.parametrize(
    "name",
    ["a.txt", "a.txt.gz", "rows.jsonl.gz", "rows.json", "lines.json", "rows.csv"],
)
def test_what_is_too_long_to_be_held_is_refused(tmp_path, monkeypatch, name):
    """As a text that a small file unpacks to."""
    rows = [{"text": "long " * 800}]
    write = tables.FORMATS.get(name, lambda rows: rows[0]["text"].encode())
    source = tables.compress(tmp_path / name, write(rows))
    for most in 9999, 3999:
        monkeypatch.setattr(json_text, "MOST_OF_ONE", most)
        monkeypatch.setattr(row_files, "MOST_OF_ONE", most)
        found = read_documents([InputFile(source, None, True)], "text")
        if most == 9999:
            assert [document.text for document in found] == [rows[0]["text"]]
    match = f"^{source}.* has more than 3,999 bytes, .* several rows or files"
    with pytest.raises(ValueError, match=match):
        list(found)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.arrow", "rows.feather"])
def test_damaged_tables_are_read_or_refused_in_one_line(tmp_path, name):
    """And never end the process. What says lengths is believed: memory is asked for."""
    content = tables.FORMATS[name](ROWS[6:])
    source = tmp_path / name

    def attempt(rng):
        source.write_bytes(damaged(content, rng))
        return list(read_rows(source, ["text", "other"]))

    def check(found):
        assert all(isinstance(row.get("text", ""), str) for _, row in found)

    fuzz(150, attempt, check, most_bytes=1 << 60)


def test_rows_of_other_sizes_than_their_header_are_named(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('id,text\n1,"two\nlines"\n2\n\n3,a,b\n4,last\n')
    found = list(read_rows(path, ["text"]))
    assert found == [
        (f"{path}:2", {"id": "1", "text": "two\nlines"}),
        (f"{path}:4", BadRow(f"{path}:4", "1 fields under a header of 2")),
        (f"{path}:6", BadRow(f"{path}:6", "3 fields under a header of 2")),
        (f"{path}:7", {"id": "4", "text": "last"}),
    ]


DOCUMENT = {
    "version": 2,
    "name": "two\nlines",
    "ö": [1.5, -3, True, None, {"deep": [[], {}]}],
    "counts": {"train": 10**12, "validation": 0},
}


def test_a_value_is_what_python_reads():
    assert parse_json(json.dumps(DOCUMENT)) == DOCUMENT
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        text = json.dumps(DOCUMENT, ensure_ascii=False).encode(encoding)
        assert parse_json(text) == DOCUMENT
    assert math.isnan(parse_json("[NaN]")[0])
    assert parse_json(str(10**4000)) == 10**4000


def test_what_is_no_object_or_too_large_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("[1]")
    with pytest.raises(ValueError, match="config.json must be a JSON object, got list"):
        read_json_object(path)
    with path.open("wb") as file:
        file.truncate(json_text.MOST_OF_ONE + 1)  # takes no room on the disk
    with pytest.raises(
        ValueError, match="config.json has more than 1,073,741,824 bytes"
    ):
        read_json_object(path)


FEW = ROWS[6:10]


def listed(root, *inputs, **options):
    """Split of each file, by its path below the root, and what is left out and why."""
    found = list_inputs([root / name for name in inputs or ["in"]], **options)
    files = {str(f.path.relative_to(root / "in")): f.split for f in found.files}
    reasons = {
        reason: (count, Path(found.left_out.first[reason]).name)
        for reason, count in found.left_out.counts.items()
    }
    return files, reasons


def fill(root, names):
    for name in names.split():
        (root / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        content = next((f(FEW) for n, f in tables.FORMATS.items() if n in name), b"[]")
        (root / "in" / name).write_bytes(content)


def test_a_dictionary_of_data_sets_keeps_its_splits(tmp_path):
    splits = dict.fromkeys(("train", "test", "validation"), FEW)
    folder = tables.save_splits(tmp_path / "in", splits)
    (folder / "train" / "cache-9f.arrow").write_bytes(tables.as_arrow(FEW))
    shards = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    files, left_out = listed(tmp_path)
    assert files == {f"train/{name}": "train" for name in shards} | {
        f"validation/{name}": "validation" for name in shards
    }
    assert left_out == {
        ".json, beside the tables of a data set": (7, "dataset_dict.json"),
        "cache of a data set": (1, "cache-9f.arrow"),
        "of split test": (2, shards[0]),
    }


def test_a_folder_of_the_hub_keeps_its_splits(tmp_path):
    tables.save_on_hub(tmp_path / "in", {"train": FEW, "test": FEW})
    names = {"train": "train", "test": "validation"}
    files, left_out = listed(tmp_path)
    assert files == {
        f"data/{name}-{number:05}-of-00002.parquet": split
        for name, split in sorted(names.items())
        for number in range(2)
    }
    assert left_out == {".md, beside the tables of a data set": (1, "README.md")}
    said, _ = list_inputs([tmp_path / "in"]).lines()
    assert said == "trained on, by their names: 2 files, held out: 2"


def test_a_mixed_folder_is_read_whole_and_of_a_data_set_in_it_the_tables(tmp_path):
    fill(tmp_path, "rows.csv rows.jsonl rows.jsonl.zst rows.parquet a.txt b/README.md")
    (tmp_path / "in/README.md").write_text("# Notes, and no card\n")
    tables.save_on_hub(tmp_path / "in/hub", {"train": FEW}, shards=1)
    tables.save_to_disk(tmp_path / "in/disk", FEW, shards=1)
    (tmp_path / "in/b/README.md").write_text("---\nno tables below\n")
    (tmp_path / "in/hub/more.jsonl").write_bytes(tables.as_lines(FEW))
    files, left_out = listed(tmp_path)
    texts = ["README.md", "a.txt", "b/README.md", "rows.csv", "rows.jsonl"]
    shards = ["disk/data-00000-of-00001.arrow", "hub/data/train-00000-of-00001.parquet"]
    others = ["rows.jsonl.zst", "rows.parquet"]
    assert sorted(files) == sorted(texts + shards + others)
    assert {*files.values()} == {None}
    beside = "beside the tables of a data set"
    assert left_out == {
        f".json, {beside}": (2, "dataset_info.json"),
        f".jsonl, {beside}": (1, "more.jsonl"),
        f".md, {beside}": (1, "README.md"),
    }


def test_splits_are_chosen_by_name(tmp_path):
    splits = dict.fromkeys(("train_sft", "train_gen", "test_sft"), FEW)
    tables.save_on_hub(tmp_path / "in", splits, shards=1)
    files, left_out = listed(tmp_path, splits=("train_sft", "test_sft"))
    assert [*files.values()] == ["validation", "train"]
    assert left_out["of split train_gen"][0] == 1
    files, _ = listed(tmp_path, splits=("train_gen",))
    assert files == {"data/train_gen-00000-of-00001.parquet": None}


@pytest.mark.parametrize("names, splits", table("data.txt", "split"))
def test_names_say_the_split_where_they_say_what_to_train_on(tmp_path, names, splits):
    fill(tmp_path, names)
    expected = splits.split() if isinstance(splits, str) else splits
    assert [*listed(tmp_path)[0].values()] == expected
    # Files that are inputs themselves are a group too.
    inputs = sorted(f"in/{name}" for name in names.split())
    if "/" not in names:
        assert [*listed(tmp_path, *inputs)[0].values()] == expected


def test_a_pattern_takes_what_it_matches(tmp_path):
    tables.save_on_hub(tmp_path / "in", {"train": FEW}, shards=3)
    (tmp_path / "in/data/train-00001-of-00003.parquet").unlink()
    files, left_out = listed(tmp_path, pattern="*[2d].*")
    assert not files and not left_out
    # But for inputs that are named.
    files, left_out = listed(tmp_path, "in", "in/README.md", pattern="*.parquet")
    assert [*files][-1] == "README.md" and len(files) == 3 and not left_out
