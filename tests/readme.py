"""README.md as its readers use it: commands to type, files and fields to look up."""

import importlib
import re
import shlex
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")

PYTHON = "python", ".venv/bin/python"
FOLDERS = "configs|data|kernels|models|results|tasks|tests|tools|training"


_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks of a language; "": of those without one."""
    return [block[2] for block in _FENCED.finditer(TEXT) if block[1] == language]


def inline_code() -> list[str]:
    """What stands between backticks in the text, line breaks taken for blanks."""
    prose = _FENCED.sub("", TEXT)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]


@dataclass(frozen=True)
class Command:
    """One command of a shell, without its comment: its words."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)

    @property
    def script(self) -> str:
        """The Python program that it starts, "" if it starts none."""
        match self.words:
            case [python, "-m", module, *_] if python in PYTHON:
                return module.replace(".", "/") + ".py"
            case [python, script, *_] if python in PYTHON:
                return script
        return ""

    @property
    def arguments(self) -> list[str]:
        """Of the program, without the dots that stand for more of them."""
        begin = 3 if "-m" in self.words else 2
        return [word for word in self.words[begin:] if word != "..."]

    @property
    def config_flags(self) -> list[str]:
        """Flags of a config, `--config=...` being any."""
        flags = [word for word in self.words if word.startswith("--config")]
        return [re.sub(r"=\.\.\.$", "=configs/base.py", flag) for flag in flags]

    @classmethod
    def of(cls, line: str) -> "Command":
        return cls(tuple(shlex.split(line, comments=True)))


def commands() -> list[Command]:
    """All of the `sh` blocks, in the order of the text."""
    lines = "".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := Command.of(line)).words]


def inline_commands() -> list[Command]:
    """Those between backticks: of Python, pytest, bash and make."""
    starts = "python ", "pytest ", "bash ", "make "
    return [Command.of(code) for code in inline_code() if code.startswith(starts)]


def paths() -> set[str]:
    """What the text says is in the tree: links, and code that looks like a path."""
    links = re.findall(r"\]\(([^):#]+)\)", TEXT)
    code = [*inline_code(), *map(str, commands())]
    inside = rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*/]"
    named = re.findall(inside, " ".join(code))
    return {*links, *named} | {p for p in code if re.fullmatch(r"[\w-]+\.(py|txt)", p)}


def anchors() -> set[str]:
    """Headings that the text links to."""
    return set(re.findall(r"\]\(#([^)]+)\)", TEXT))


def headings() -> set[str]:
    """As a link would name them."""
    found = re.findall(r"^#+ (.+)$", _FENCED.sub("", TEXT), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in found}


class _Found(Exception):
    """Carries the parser that a program was about to use."""


def parser_of(script: str, arguments: list[str]) -> ArgumentParser:
    """The parser of a program in tools/, caught when the program parses with it."""

    def catch(parser: ArgumentParser, *_: object) -> None:
        raise _Found(parser)

    program = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    both = {"parse_args": catch, "parse_known_args": catch}
    with mock.patch.multiple(ArgumentParser, **both):
        try:
            program.main(arguments)
        except _Found as found:
            return found.args[0]
    raise AssertionError(f"{script} parses nothing")
