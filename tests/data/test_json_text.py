"""JSON of others: values as Python reads them, and one line for all that is none."""

import json
import math

import numpy as np
import pytest

from data import json_text
from data.json_text import parse_json, read_json_object
from tests.fuzzing import altered, damaged, fuzz

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
        file.truncate(json_text.MOST_BYTES + 1)  # takes no room on the disk
    with pytest.raises(ValueError, match="config.json has 67108865 bytes, and .* most"):
        read_json_object(path)


@pytest.mark.parametrize(
    "attempts", [200, pytest.param(20_000, marks=pytest.mark.slow)]
)
def test_damaged_json_is_its_value_or_refused(tmp_path, attempts):
    path = tmp_path / "config.json"

    def attempt(rng: np.random.Generator) -> dict:
        text = altered(DOCUMENT, rng).encode("utf-8", "surrogatepass")
        path.write_bytes(text if rng.integers(2) else damaged(text, rng))
        return read_json_object(path)

    def check(found: dict) -> None:
        # As text, in which NaN is itself, and no object has a name twice.
        again = json.loads(path.read_bytes())
        assert json.dumps(again) == json.dumps(found)

    counts = fuzz(attempts, attempt, check, most_bytes=20 << 20)
    assert counts["read"] > attempts // 10 and counts["refused"] > attempts // 10
