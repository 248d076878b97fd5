"""Programs refuse wrong command lines in one line, and write nothing."""

import importlib
from pathlib import Path

import pytest

from tests.cases import pairs

# Files that are wrong in ways of their own, for `{name}` below.
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


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_command_line_is_one_line_and_writes_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
