import json
from pathlib import Path

import matplotlib.image
import pytest

from kernels.cases import Case
from tools import plot_errors
from tools.lib.picture import GREY, PROGRAMS
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


def test_the_legend_has_both_lines_in_the_colours_of_all_panels(rows):
    figure = draw(rows)
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["striped ring", "plain attention on one device"]
    for axes in figure.axes:
        assert [line.get_label() for line in axes.lines] == shown
        colours = [line.get_color() for line in axes.lines]
        assert colours == [PROGRAMS["this repository"], GREY]
    assert figure.get_suptitle()


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


@pytest.mark.parametrize(
    ("order", "change", "complaint"),
    [
        ([0, 1, 2, 2], {}, r"rings of \[1, 2, 2\] devices, .*make no curve"),
        ([0, 2, 1], {}, r"rings of \[2, 1\] devices"),
        ([0, 1, 2], {"length": 7}, "make no curve: there must be one of each"),
        ([0, 1, 2], {"error_dk": float("nan")}, "error_dk of row 2 .*got nan"),
        ([0, 1, 2], {"error_dk": -1.0}, "error_dk of row 2 .*got -1.0"),
        ([0, 1, 2], {"error_dk": "1"}, "error_dk of row 2 .*got '1'"),
    ],
    ids=["twice", "order", "problem", "nan", "negative", "text"],
)
def test_rows_that_make_no_curve_are_refused(rows, order, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        draw([rows[i] | (change if i == 2 else {}) for i in order])


def test_tokens_that_do_not_divide_are_refused(tmp_path, capsys):
    assert main(["--tokens", "100", "--output", str(tmp_path / "out")]) == 1
    assert "--tokens 100 must be a multiple of 8" in capsys.readouterr().err
