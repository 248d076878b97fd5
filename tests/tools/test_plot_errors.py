import json
from pathlib import Path

import matplotlib.image
import pytest

from tests.cases import Case
from tools import plot_errors
from tools.plot_errors import RESULTS, draw, main, measure, table

COMMITTED = Path(plot_errors.__file__).parents[1] / "results/cpu/error_by_ring.json"


@pytest.fixture(scope="module")
def rows():
    return measure(Case(1, "striped", "causal", 4, 64, 16), (1, 2))


def test_rings_are_as_exact_as_one_device(rows):
    one, *rings = rows
    assert [row["ring_size"] for row in rows] == [0, 1, 2]
    for name in RESULTS:
        for row in rings:
            assert 1e-5 < row[f"error_{name}"] < 2 * one[f"error_{name}"]
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert all(row["commit"] and row["date"] for row in rows)


def test_committed_errors_do_not_grow_with_the_ring():
    one, *rings = json.loads(COMMITTED.read_text())
    assert one["system"] == plot_errors.ONE_DEVICE
    assert [row["ring_size"] for row in rings] == list(plot_errors.RINGS)
    for name in RESULTS:
        errors = [row[f"error_{name}"] for row in rings]
        assert max(errors) < 1.1 * errors[0]
        assert max(errors) < 1.1 * one[f"error_{name}"]


def test_curves_are_the_rows(rows):
    figure = draw(rows)
    for axes, name in zip(figure.axes, RESULTS, strict=True):
        assert axes.get_title() == name
        curve, dotted = axes.lines
        errors = [1e3 * row[f"error_{name}"] for row in rows]
        assert list(curve.get_xdata()) == [1, 2]
        assert list(curve.get_ydata()) == errors[1:]
        assert set(dotted.get_ydata()) == {errors[0]}
    assert "one device" in table(rows) and "ring of 2" in table(rows)


def test_program_draws_rows_that_are_there(rows, tmp_path, capsys):
    path, folder = tmp_path / "rows.json", tmp_path / "new" / "results"
    path.write_text(json.dumps(rows))
    assert main(["--rows", str(path), "--output", str(folder)]) == 0
    assert "ring of 2" in capsys.readouterr().out
    picture = matplotlib.image.imread(folder / "error_by_ring.png")
    assert picture.shape[1] == 1440
    assert [p.name for p in folder.rglob("*") if p.is_file()] == ["error_by_ring.png"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("{", "is no JSON"), ("[]", "0 rows of one device and 0 of rings")],
)
def test_rows_that_cannot_be_drawn_are_refused(text, complaint, tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert main(["--rows", str(path), "--output", str(tmp_path / "out")]) == 1
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_tokens_that_do_not_divide_are_refused(tmp_path, capsys):
    assert main(["--tokens", "100", "--output", str(tmp_path / "out")]) == 1
    assert "--tokens 100 must be a multiple of 8" in capsys.readouterr().err
