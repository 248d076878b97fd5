"""Every file in tools/ is a program: it answers --help and refuses in one line."""

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tools
from tests.cases import pairs, table
from tests.support import tables
from tests.support.tables import as_arrow, as_lines
from tools import evaluate, prepare_chat, prepare_text
from tools.lib.files import replacing, write_json
from tools.lib.planning.step import Step

FOLDER = Path(next(iter(tools.__path__)))
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")

FILES = dict(table("data.txt", "wrong", bytes=bytes, range=range))
"""Files that are wrong in ways of their own, for `{name}` in command_lines.txt."""
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
    assert printed.startswith("usage")
    assert f"python -m tools.{name} " in printed
    for line in program.__doc__.strip().splitlines():
        assert line in printed


def test_the_readme_has_a_line_for_each_program():
    lines = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(lines) == NAMES


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
    (tmp_path / "full" / "config.json").write_text('{"head_dim": 8, "head_dim": 10}')

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


def test_a_full_disk_leaves_the_file_of_before(tmp_path):
    path = tmp_path / "x.png"
    path.write_text("before")
    with pytest.raises(OSError, match="no space"), replacing(path) as part:
        part.write_text("half")
        raise OSError("no space")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


# Files that corpora cannot be made of: one clear line each, and nothing written.

TEXTS = [{"text": f"text {number}"} for number in range(9)]
FIELD = [{"content": "text"}]
FEATHER = as_arrow(TEXTS, pa.ipc.new_file)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
PACKED = pa.compress(as_lines(TEXTS), "gzip", asbytes=True)
HI, HO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}
CHAT = [HI, HO]


def without_shard(root: Path) -> None:
    tables.save_on_hub(root / "in", {"train": TEXTS}, shards=3)
    (root / "in/data/train-00001-of-00003.parquet").unlink()


def without_listed(root: Path) -> None:
    tables.save_to_disk(root / "in", TEXTS)
    (root / "in/data-00001-of-00002.arrow").unlink()


def of_splits(*names: str) -> Callable[[Path], Any]:
    return lambda root: tables.save_on_hub(root / "in", dict.fromkeys(names, TEXTS))


def turns(*more: Any) -> bytes:
    return as_lines([{"messages": CHAT}, {"messages": [*CHAT, *more]}])


def rows(**more: Any) -> bytes:
    return as_lines([{"messages": CHAT} | more])


KNOWN = vars(tables) | {"TEXTS": TEXTS, "FIELD": FIELD, "LFS": LFS, "turns": turns}
KNOWN |= {"FEATHER": FEATHER, "PACKED": PACKED, "HI": HI, "HO": HO, "rows": rows}
KNOWN |= {"bytes": bytes, "range": range, "of_splits": of_splits}
KNOWN |= {"without_shard": without_shard, "without_listed": without_listed}


@pytest.mark.parametrize(
    ("program", "name", "made", "more", "said"),
    [
        (program, name, made, " ".join([*always, *more]), said)
        for kind, program, *always in (
            ("text", prepare_text),
            ("chats", prepare_chat, "--context-tokens 640"),
        )
        for name, made, *more, said in table("inputs.txt", kind, **KNOWN)
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_input_is_one_line_and_writes_nothing(
    program: Any,
    name: str,
    made: Any,
    more: str,
    said: str,
    tmp_path: Path,
    capsys: Any,
) -> None:
    source = tmp_path / name.rstrip("~")
    if callable(made):
        made(tmp_path)
    elif name.endswith("~"):
        source.write_bytes(made)
    else:
        tables.compress(source, made)
    before = sorted(tmp_path.rglob("*"))
    arguments = [str(source), "--output", str(tmp_path / "out"), *more.split()]
    assert program.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    expected = said.replace(f"{{{source.name}}}", str(source))
    assert line.startswith("error: ") and expected in line, line
    assert str(source) in line or "split" in line or "documents" in line, line
    assert sorted(tmp_path.rglob("*")) == before


def test_json_has_a_row_or_an_array_a_line(tmp_path):
    row = {"a": 1, 2: "[ x ]\n"}
    value = {"rows": [row, {}, [1.5, None], (2,)], "none": {}, "deep": {"er": [[]]}}
    path = tmp_path / "x.json"
    write_json(path, value)
    assert json.loads(path.read_text()) == json.loads(json.dumps(value))
    lines = path.read_text().splitlines()
    assert lines[2:6] == [
        '  {"a": 1, "2": "[ x ]\\n"},',
        "  {},",
        "  [1.5, null],",
        "  [2]",
    ]
    assert len(lines) == 14
    write_json(path, "text")
    assert path.read_text() == '"text"\n'
