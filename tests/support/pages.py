"""The pages of documentation as their readers use them: links, commands, fields."""

import importlib
import re
import shlex
from argparse import ArgumentParser
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = "python", ".venv/bin/python"
FOLDERS = "configs|data|docs|kernels|models|results|tasks|tests|tools|training"

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """The words of one command of a shell, without its comment."""

    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.words)

    @property
    def program(self) -> str:
        """The module or script that Python starts, "" if the command starts none."""
        match self.words:
            case [python, "-m", module, *_] if python in PYTHON:
                return module
            case [python, script, *_] if python in PYTHON:
                return script
        return ""

    @property
    def arguments(self) -> list[str]:
        """Arguments of the program, without the dots that stand for more of them."""
        begin = 3 if "-m" in self.words else 2
        return [word for word in self.words[begin:] if word != "..."]

    @classmethod
    def of(cls, line: str) -> "Command":
        return cls(tuple(shlex.split(line, comments=True)))


@dataclass(frozen=True)
class Page:
    """A Markdown file of the repository."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text without its fenced blocks."""
        return _FENCED.sub("", self.text)

    def blocks(self, language: str) -> list[str]:
        """Returns the contents of the fenced blocks of a language."""
        return [text for name, text in _FENCED.findall(self.text) if name == language]

    def lines_to_read(self) -> int:
        """Returns the number of lines outside of programs in Python, which run."""
        programs = "".join(self.blocks("python"))
        return len(self.text.splitlines()) - len(programs.splitlines())

    def commands(self) -> list[Command]:
        """Returns the commands of the `sh` blocks, in their order."""
        lines = "".join(self.blocks("sh")).replace("\\\n", " ").splitlines()
        return [command for line in lines if (command := Command.of(line)).words]

    def inline_code(self) -> list[str]:
        """Returns what stands between backticks, line breaks taken for blanks."""
        return [" ".join(c.split()) for c in re.findall(r"`([^`]+)`", self.prose)]

    def inline_commands(self) -> list[Command]:
        """Returns commands of Python, pytest, bash and make between backticks."""
        starts = "python ", "pytest ", "bash ", "make "
        return [Command.of(c) for c in self.inline_code() if c.startswith(starts)]

    def links(self) -> list[tuple[Path, str]]:
        """Returns file and anchor ("" for none) of every link within the repository."""
        found = re.findall(r"\]\(([^)\s]+)\)", self.prose)
        inside = [link.partition("#") for link in found if ":" not in link]
        folder = self.path.parent
        return [((folder / f).resolve() if f else self.path, a) for f, _, a in inside]

    def anchors(self) -> set[str]:
        """Returns the page's headings as a link names them."""
        names = re.findall(r"^#+ (.+)$", self.prose, re.MULTILINE)
        return {re.sub(r"[^\w -]", "", n).lower().replace(" ", "-") for n in names}

    def paths(self) -> set[str]:
        """Returns what code and commands name as a path of the repository."""
        code = [*self.inline_code(), *map(str, self.commands())]
        inside = rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*/]"
        return set(re.findall(inside, " ".join(code)))

    def file_names(self) -> set[str]:
        """Returns the names of source files that code names without their folders."""
        name = re.compile(r"[\w-]+\.(py|txt|sh)")
        return {code for code in self.inline_code() if name.fullmatch(code)}


NAMED = "README.md", "CONTRIBUTING.md", "tools/README.md"
FOUND = *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")
PAGES = [Page(path) for path in (*(ROOT / name for name in NAMED), *sorted(FOUND))]
README = PAGES[0]
LIVING = [page for page in PAGES if not re.match(r"results/\d", str(page))]
"""All but the dated reports, which describe the commit that they name."""
LOG = Page(ROOT / "LOG.md")
COMMANDS = list(dict.fromkeys(c for page in LIVING for c in page.commands()))
INLINE = list(dict.fromkeys(c for page in LIVING for c in page.inline_commands()))


def parser_of(program: str, arguments: list[str]) -> tuple[ArgumentParser, list[str]]:
    """Returns the parser of a module, or of its subcommand, and what it is given."""
    main = importlib.import_module(program).main
    patch = mock.patch.object(ArgumentParser, "parse_known_args", autospec=True)
    with patch as parse, pytest.raises(LookupError):
        parse.side_effect = LookupError
        main(arguments)
    return parse.call_args.args[:2]
