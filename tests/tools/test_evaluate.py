"""The front door of evaluations."""

import sys

import pytest

from tools.evaluate import MODULES, main


def test_help_lists_every_subcommand_and_imports_none(monkeypatch, capsys):
    for module in MODULES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, module in MODULES.items():
        assert any(words[:1] == [name] and len(words) > 3 for words in listed), name
        assert module not in sys.modules


@pytest.mark.parametrize("name", MODULES)
def test_a_subcommand_answers_for_itself(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert f"usage: python -m tools.evaluate {name} " in capsys.readouterr().out
