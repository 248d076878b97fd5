"""Shows lines such as "scale: factor on the scores" of a docstring as a list."""

import re
from typing import Any

import griffe

_LINE = re.compile(r"^([a-z]\w*(?:, \w+)*): (?=\S)", re.MULTILINE)


class NamesAsList(griffe.Extension):
    """Changes each docstring before mkdocstrings parses it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.docstring:
            return
        names = {*obj.members, *(p.name for p in getattr(obj, "parameters", ()))}

        def item(found: re.Match) -> str:
            known = set(found[1].split(", ")) <= names
            return f"- **{found[1]}**: " if known else found[0]

        obj.docstring.value = _LINE.sub(item, obj.docstring.value)
