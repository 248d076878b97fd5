"""Every file in tools/ is a program: it answers --help and refuses in one line."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

import tools
from tests.cases import pairs
from tools import evaluate
from tools.lib.files import replacing, write_json
from tools.lib.planning.step import Step

FOLDER = Path(next(iter(tools.__path__)))
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")

# Files that are wrong in ways of their own, for `{name}` in command_lines.txt.
FILES = {
    "garbage": bytes(range(256)),
    "nothing.json": b"",
    "deep.json": b"[" * 100_000,
    "numbers.json": b"[1, 2]",
    "object.json": b'{"a": 1}',
    "rows.json": b'[{"a": 1}]',
    "no_rows.json": b"[]",
    "text.txt": b"The ring turns.\n" * 50,
}
TINY = "--config=configs/tiny.py --config.workdir={new} --config.data.corpus={new}"
TINY += " --config.model.vocab_size=264"
CASES = dict(pairs("command_lines.txt"))


@pytest.mark.parametrize("name", [*NAMES, *(f"evaluate {n}" for n in evaluate.MODULES)])
def test_every_program_answers_help_in_the_words_of_its_module(name, capsys):
    file, *subcommand = name.split()
    program = importlib.import_module(f"tools.{file}")
    with pytest.raises(SystemExit, match="0"):
        program.main([*subcommand, "--help"])
    if subcommand:
        program = sys.modules[evaluate.MODULES[subcommand[0]]]
    else:
        ending = 'if __name__ == "__main__":\n    sys.exit(main())\n'
        assert Path(program.__file__).read_text().endswith(ending)
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"usage: python -m tools.{name} " if subcommand else "usage"
    )
    assert f"python -m tools.{name} " in printed
    for line in program.__doc__.strip().splitlines():
        assert line in printed


def test_the_readme_has_a_line_for_each_program():
    lines = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(lines) == NAMES


def test_no_test_of_the_library_needs_a_tool_but_for_compilers():
    root = Path(__file__).parents[1]
    files = [
        path
        for folder in ("kernels", "models", "data", "training", "survival")
        for path in (root / folder).rglob("*.py")
    ]
    assert len(files) > 50
    needs = re.compile(r"^\s*(from|import) tools\b(?!\.lib\.compiled)", re.M)
    assert [path for path in files if needs.search(path.read_text())] == []


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_command_line_is_one_line_and_writes_nothing(
    case: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Step, "compile", lambda step: pytest.fail("compiled"))
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    def filled(text: str) -> str:
        for name in (*FILES, "full", "new"):
            text = text.replace(f"{{{name}}}", str(tmp_path / name))
        return text

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    program, *arguments = filled(case.replace("{tiny}", TINY)).split()
    assert importlib.import_module(f"tools.{program}").main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and filled(CASES[case]) in line, line
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# Files that are there whole or not at all.


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
