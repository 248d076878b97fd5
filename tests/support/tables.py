"""Texts and conversations as files of every format that corpora are prepared from."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import ipc, parquet

Rows = Sequence[dict[str, Any]]


def compress(path: Path, content: bytes) -> Path:
    """Writes bytes, compressed as the ending says."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        with pa.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)
    else:
        path.write_bytes(content)
    return path


def as_lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_list(rows: Rows) -> bytes:
    return json.dumps(rows, indent=1, ensure_ascii=False).encode()


def as_csv(rows: Rows, delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0]], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_parquet(rows: Rows, row_group_size: int = 7) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size)
    return sink.getvalue().to_pybytes()


def as_arrow(rows: Rows, kind: Any = ipc.new_stream, batch: int = 7) -> bytes:
    """As Hugging Face's library writes tables: a stream, or else a file."""
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with kind(sink, table.schema) as writer:
        writer.write_table(table, batch)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, Callable[[Rows], bytes]] = {
    "rows.jsonl": as_lines,
    "rows.json": as_list,
    "lines.json": as_lines,
    "rows.csv": as_csv,
    "rows.tsv": lambda rows: as_csv(rows, "\t"),
    "rows.parquet": as_parquet,
    "rows.arrow": as_arrow,
    "rows.feather": lambda rows: as_arrow(rows, ipc.new_file),
}
FORMATS |= {
    f"{name}{codec}": FORMATS[name]
    for name in ("rows.jsonl", "rows.json", "lines.json", "rows.csv", "rows.arrow")
    for codec in (".gz", ".zst")
}
"""What writes a file of each name."""


def save_to_disk(folder: Path, rows: Rows, shards: int = 2) -> Path:
    """Writes a data set as `datasets` does: shards, and the list of them."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    size = -(-len(rows) // shards)
    for number, name in enumerate(names):
        part = rows[number * size : (number + 1) * size]
        (folder / name).write_bytes(as_arrow(part))
    state = {"_data_files": [{"filename": n} for n in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def save_splits(folder: Path, splits: dict[str, Rows]) -> Path:
    """Writes a `DatasetDict`."""
    for name, rows in splits.items():
        save_to_disk(folder / name, rows)
    index = json.dumps({"splits": [*splits]})
    (folder / "dataset_dict.json").write_text(index)
    return folder


def save_on_hub(folder: Path, splits: dict[str, Rows], shards: int = 2) -> Path:
    """Writes a data set as the hub has it: Parquet files beside a card."""
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A card\n")
    for name, rows in splits.items():
        size = -(-len(rows) // shards)
        for number in range(shards):
            part = rows[number * size : (number + 1) * size]
            file = folder / "data" / f"{name}-{number:05}-of-{shards:05}.parquet"
            file.write_bytes(as_parquet(part))
    return folder
