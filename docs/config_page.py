"""Writes docs/config.md, the fields of configs/base.py by subject, for `make docs`.

A comment there belongs to the next field, or that of its line; "#:" begins a subject.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/config.md"
HEAD = """# Fields of a config

`--config.NAME=VALUE` changes a field, as `--config.mesh.ring=4`. Agents have more
fields, in [configs/agents.py](../configs/agents.py). `make docs` makes this page from
the comments of [configs/base.py](../configs/base.py).
"""
_TABLE = "\n| field | default | |\n|---|---|---|"
_LINE = re.compile(
    r"""\ +(?:\#:\ (?P<subject>.+)|\#\ (?P<comment>.+)|(?P<section>\w+)=dict\(|\),
    |(?P<name>\w+)=(?P<value>.+),(?:\ \ \#\ (?P<after>.+))?)""",
    re.VERBOSE,
)


def page(source: str) -> str:
    """Returns the page of the text of configs/base.py.

    Raises:
      ValueError: a line there is neither comment nor field, or a field has no comment.
    """
    lines, said, section = [HEAD.rstrip()], [], ""
    body = source.partition("FIELDS = dict(\n")[2].partition("\n)\n")[0]
    for line in body.splitlines():
        if not (found := _LINE.fullmatch(line)):
            raise ValueError(f"configs/base.py: neither comment nor field: {line!r}")
        part = found.groupdict()
        meaning = " ".join([*said, *filter(None, [part["after"]])])
        if part["comment"]:
            said.append(part["comment"])
            continue
        said = []
        if part["subject"]:
            lines.append(f"\n## {part['subject']}\n{_TABLE}")
        elif part["section"]:
            section = part["section"] + "."
            lines.append(f"\n## `{section[:-1]}`\n\n{meaning}\n{_TABLE}")
        elif part["name"] and not meaning:
            raise ValueError(
                f"configs/base.py: give a comment to {section}{part['name']}"
            )
        elif part["name"]:
            cell = meaning[0].upper() + meaning[1:]
            lines.append(f"| `{section}{part['name']}` | `{part['value']}` | {cell} |")
        else:
            section = ""
    return re.sub(r"\n\n\n+", "\n\n", "\n".join(lines) + "\n")


if __name__ == "__main__":
    PAGE.write_text(page((ROOT / "configs/base.py").read_text()))
