"""Writes docs/config.md, the fields of configs/base.py by subject, for `make docs`.

A comment there belongs to the next field, or that of its line; "#:" begins a subject.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/config.md"
HEAD = """# Fields of a config

`--config.NAME=VALUE` changes a field, as `--config.mesh.ring=4`. Agents have more \
fields, in [configs/agents.py](../configs/agents.py). `make docs` makes this page from \
the comments of [configs/base.py](../configs/base.py)."""
_TABLE = "\n| field | default | |\n|---|---|---|"
_FIELD = r"(\w+)=(?:dict\(|(.+),(?:  # (.+))?)"
_LINE = re.compile(rf" +(?:#: (.+)|# (.+)|\),|{_FIELD})")


def page(source: str) -> str:
    """Returns the page of the text of configs/base.py.

    Raises:
      ValueError: a line there is neither comment nor field, or a field has no comment.
    """
    lines, said, section = [HEAD], [], ""
    body = source.partition("FIELDS = dict(\n")[2].partition("\n)\n")[0]
    for line in body.splitlines():
        if not (found := _LINE.fullmatch(line)):
            raise ValueError(f"configs/base.py: neither comment nor field: {line!r}")
        subject, comment, name, value, after = found.groups()
        said += filter(None, [comment, after])
        if comment:
            continue
        meaning, said = " ".join(said), []
        if subject:
            lines.append(f"\n## {subject}{_TABLE}")
        elif not name:
            section = ""
        elif not value:
            section = f"{name}."
            lines.append(f"\n## `{name}`" + f"\n\n{meaning}" * bool(meaning))
            lines.append(_TABLE)
        elif meaning:
            cell = meaning[0].upper() + meaning[1:]
            lines.append(f"| `{section}{name}` | `{value}` | {cell} |")
        else:
            raise ValueError(f"configs/base.py: give a comment to {section}{name}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page((ROOT / "configs/base.py").read_text()))
