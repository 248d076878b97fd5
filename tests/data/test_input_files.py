"""Files of inputs: data sets keep their splits, and what is left out is named."""

from pathlib import Path

import pytest

from data.text.input_files import list_inputs
from tests import tables
from tests.cases import table

ROWS = [{"text": f"text {number}"} for number in range(4)]


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
        content = next((f(ROWS) for n, f in tables.FORMATS.items() if n in name), b"[]")
        (root / "in" / name).write_bytes(content)


def test_a_dictionary_of_data_sets_keeps_its_splits(tmp_path):
    splits = dict.fromkeys(("train", "test", "validation"), ROWS)
    folder = tables.save_splits(tmp_path / "in", splits)
    (folder / "train" / "cache-9f.arrow").write_bytes(tables.as_arrow(ROWS))
    shards = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    files, left_out = listed(tmp_path)
    assert files == {f"train/{name}": "train" for name in shards} | {
        f"validation/{name}": "validation" for name in shards
    }
    assert left_out == {
        "beside Parquet or Arrow files": (7, "dataset_dict.json"),
        "not listed in state.json": (1, "cache-9f.arrow"),
        "of split test": (2, shards[0]),
    }


def test_a_folder_of_the_hub_keeps_its_splits(tmp_path):
    tables.save_on_hub(tmp_path / "in", {"train": ROWS, "test": ROWS})
    names = {"train": "train", "test": "validation"}
    files, left_out = listed(tmp_path)
    assert files == {
        f"data/{name}-{number:05}-of-00002.parquet": split
        for name, split in sorted(names.items())
        for number in range(2)
    }
    assert left_out == {"beside Parquet or Arrow files": (1, "README.md")}
    said, _ = list_inputs([tmp_path / "in"]).lines()
    assert said == "trained on, by their names: 2 files, held out: 2"


def test_splits_are_chosen_by_name(tmp_path):
    splits = dict.fromkeys(("train_sft", "train_gen", "test_sft"), ROWS)
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
    tables.save_on_hub(tmp_path / "in", {"train": ROWS}, shards=3)
    (tmp_path / "in/data/train-00001-of-00003.parquet").unlink()
    files, left_out = listed(tmp_path, pattern="*[2d].*")
    assert not files and not left_out
    # But for inputs that are named.
    files, left_out = listed(tmp_path, "in", "in/README.md", pattern="*.parquet")
    assert [*files][-1] == "README.md" and len(files) == 3 and not left_out
