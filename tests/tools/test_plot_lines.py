"""Heat maps of line retrieval: which number is in which cell."""

import json

import pytest

from tools.plot_lines import heat_maps, main


def rows(run: str, shares: dict[tuple[int, float], float]) -> list[dict]:
    return [
        {"run": run, "length": length, "depth": depth, "generated": share}
        for (length, depth), share in shares.items()
    ]


LONG = rows("long", {(128, 0.0): 1.0, (128, 1.0): 0.95, (512, 0.0): 0.5})
SHORT = rows("short", {(128, 0.0): 0.25, (512, 1.0): 0.0})


def test_each_run_has_a_map_with_lengths_across_and_depths_down():
    figure = heat_maps(LONG + SHORT)
    long, short = figure.axes
    assert (long.get_title(), short.get_title()) == ("long", "short")
    assert [label.get_text() for label in long.get_xticklabels()] == ["128", "512"]
    assert [label.get_text() for label in long.get_yticklabels()] == ["0%", "100%"]
    written = {text.get_position(): text.get_text() for text in long.texts}
    # The cell that has no cases stays empty.
    assert written == {(0, 0): "100", (0, 1): "95", (1, 0): "50"}
    shares = long.images[0].get_array()
    assert shares[0].tolist() == [1.0, 0.5] and shares[1, 0] == 0.95
    assert {t.get_position(): t.get_text() for t in short.texts} == {
        (0, 0): "25",
        (1, 1): "0",
    }


@pytest.mark.parametrize(
    ("runs", "names", "titles"),
    [
        (["runs/lines/160", "runs/lines/32"], [], ["160", "32"]),
        (["runs/a/one", "runs/b/one"], [], ["runs/a/one", "runs/b/one"]),
        (["runs/lines/160", "runs/lines/32"], ["long", "short"], ["long", "short"]),
    ],
    ids=["folders", "paths", "names"],
)
def test_runs_have_names(runs, names, titles):
    first, second = (rows(run, {(128, 0.0): 1.0, (256, 0.0): 0.5}) for run in runs)
    # A run's rows need not follow each other.
    figure = heat_maps([first[0], *second, first[1]], names)
    assert [axes.get_title() for axes in figure.axes] == titles
    assert all(len(axes.texts) == 2 for axes in figure.axes)


@pytest.mark.parametrize(
    ("some", "names", "said"),
    [
        ([], [], "0 names for 0 runs .no rows.: there must be a run"),
        (LONG + SHORT, ["one"], "1 names for 2 runs .long, short.: there must be"),
        (LONG + LONG[:1], [], "long, 128 tokens, depth 0%: .* is there twice"),
        (rows("a", {(128, 0.5): 1.5}), [], "a, 128 tokens, depth 50%: .*more than all"),
        (rows("a", {(128, 0.5): -0.5}), [], "generated of row 0 must be a number"),
        (rows("a", {(128, 0.5): None}), [], "generated of row 0 .* got None"),
        (rows("a", {("128", 0.5): 1.0}), [], "length of row 0 .* got '128'"),
    ],
)
def test_rows_that_make_no_map_are_refused(some, names, said):
    with pytest.raises(ValueError, match=said):
        heat_maps(some, names)


def test_program_draws_the_rows_of_several_files(tmp_path, capsys):
    files = []
    for name, some in (("a", LONG), ("b", SHORT)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(some))
    picture = tmp_path / "lines.png"
    assert main([*map(str, files), "--output", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "a.json",
        "b.json",
        picture.name,
    ]
    assert main(["nowhere.json", "--output", str(picture)]) == 1
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["run", "length", "generated"])
def test_rows_of_something_else_are_refused(missing, tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{k: v for k, v in LONG[0].items() if k != missing}]))
    assert main([str(path), "--output", str(tmp_path / "x.png")]) == 1
    assert missing in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
