import functools

import jax
import jax.numpy as jnp
import pytest

from tools.lib.benchmarks.rows import (
    Environment,
    Sample,
    check_output,
    make_row,
    peak_share,
    read_rows,
    take_rounds,
    take_sample,
)
from tools.lib.figures import curves
from tools.lib.papers import contexts as paper_contexts


def environment(device_kind: str, device_count: int) -> Environment:
    return Environment(None, False, "", "", device_kind, device_count, 1, 0.0)


def test_environment_tells_commit_and_devices():
    found = Environment.of(jax.devices()[:3])
    assert (found.device_kind, found.device_count) == ("cpu", 3)
    assert found.jax == jax.__version__
    assert found.cores >= 1 and found.load >= 0
    assert found.date.endswith("+00:00")
    assert found.commit is None or len(found.commit) == 40


def test_runs_are_timed_in_rounds_and_the_first_does_not_count():
    calls, waited = [], []

    def take(name):
        return take_sample(lambda: calls.append(name) or name, 2, waited.append)

    takes = [functools.partial(take, name) for name in "ab"]
    samples = take_rounds(takes, repeats=2)
    assert "".join(calls) == "aabb" * 3 and "".join(waited) == "ab" * 3
    assert [len(mine) for mine in samples] == [2, 2]
    assert all(sample.wall > 0 for mine in samples for sample in mine)


def test_share_of_the_peak_is_known_for_known_chips_in_bfloat16_only():
    chips = environment("NVIDIA H100 80GB HBM3", 2)
    assert peak_share(989e12, chips, jnp.bfloat16) == pytest.approx(0.5)
    assert peak_share(1e12, environment("cpu", 8), jnp.bfloat16) is None
    assert peak_share(1e12, chips, jnp.float32) is None


def test_row_holds_the_fields_of_its_parts():
    row = make_row(Sample(1.0, 2.0), {"length": 8})
    assert row == {"wall": 1.0, "cpu": 2.0, "length": 8}
    with pytest.raises(ValueError, match=r"two parts have \['cpu'\]"):
        make_row(Sample(1.0, 2.0), {"cpu": 8})


def test_rows_are_written_only_to_a_new_file(tmp_path):
    path = tmp_path / "rows.json"
    check_output(path)
    path.touch()
    with pytest.raises(ValueError, match="rows.json exists: give another --output"):
        check_output(path)
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        check_output(tmp_path / "nowhere" / "rows.json")


NAME = f"{paper_contexts.TARGETS[0].name('nothing')}.json"  # which tables read
BAD = {"deep": "[" * 100_000, "digits": f"[{'9' * 5000}]"}
BAD |= {"twice": '[{"a": 1, "a": 2}]'}
READERS = {
    "rows": read_rows,
    "results": lambda path: curves.read_returns([path]),
    "tables": lambda path: paper_contexts.rows(path.parent),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("bad", BAD)
def test_programs_read_files_of_others_by_the_same_rules(tmp_path, name, bad):
    path = tmp_path / NAME
    path.write_text(BAD[bad])
    with pytest.raises(ValueError, match=NAME) as caught:
        READERS[name](path)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500
