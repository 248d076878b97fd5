"""Every file in tools/ is a program that answers --help and is in tools/README.md."""

import importlib
import re
from pathlib import Path

import pytest

import tools

FOLDER = Path(next(iter(tools.__path__)))
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_a_program_that_answers_help(name, capsys):
    program = importlib.import_module(f"tools.{name}")
    with pytest.raises(SystemExit) as ended:
        program.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ")
    for line in program.__doc__.strip().splitlines():
        assert line in printed
    assert f"python -m tools.{name} " in printed
    ending = 'if __name__ == "__main__":\n    sys.exit(main())\n'
    assert Path(program.__file__).read_text().endswith(ending)


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
