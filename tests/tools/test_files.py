"""Files that are there whole or not at all."""

import json

import pytest

from tools.lib.files import replacing, write_json


def test_a_value_is_written_in_place_of_an_earlier_one(tmp_path):
    path = tmp_path / "rows.json"
    for value in ([{"a": 1}], [{"a": None}]):
        write_json(path, value)
        assert json.loads(path.read_text()) == value
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "x.png"
    path.write_text("before")
    with pytest.raises(OSError, match="no space"), replacing(path) as part:
        part.write_text("half")
        raise OSError("no space")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
