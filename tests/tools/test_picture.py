"""Colours that stand for one thing each, and pictures that are there whole or not."""

import pytest
from matplotlib.figure import Figure

from tools.lib import picture
from tools.lib.picture import AGENTS, MODELS, PROGRAMS, style, write_picture
from tools.plot_overlap import LOOKS


@pytest.mark.parametrize("colours", [PROGRAMS, AGENTS, MODELS, LOOKS])
def test_no_two_have_one_colour(colours):
    assert len(set(colours.values())) == len(colours) > 2


def test_style_writes_titles_and_labels():
    axes = style(Figure().subplots(), title="a title", x="across", y="up")
    texts = axes.get_title(), axes.get_xlabel(), axes.get_ylabel()
    assert texts == ("a title", "across", "up")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere/x.png", "nowhere is not a directory: give the path of a PNG"),
        ("folder", "folder is a directory: give the path of a PNG"),
    ],
)
def test_a_path_that_is_none_of_a_picture_is_named(tmp_path, name, said):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=said):
        write_picture(tmp_path / name, Figure())
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_full_disk_leaves_the_picture_of_before(tmp_path, monkeypatch):
    path = tmp_path / "x.png"
    path.write_text("before")

    class Broken(Figure):
        def savefig(self, part, **options):
            part.write_text("half")
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        write_picture(path, Broken())
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
    monkeypatch.setattr(picture, "DOTS_PER_INCH", 10)
    write_picture(path, Figure())
    assert path.read_bytes().startswith(b"\x89PNG")
