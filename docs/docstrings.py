"""Shows lines such as "scale: factor on the scores" of a docstring as a list."""

import re
from typing import Any

import griffe


class NamesAsList(griffe.Extension):
    """Changes each docstring before mkdocstrings parses it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        names = [*obj.members, *(p.name for p in getattr(obj, "parameters", ()))]
        if obj.docstring and names:
            name = "|".join(map(re.escape, names))
            line = rf"(?m)^((?:{name})(?:, (?:{name}))*): (?=\S)"
            obj.docstring.value = re.sub(line, r"- **\1**: ", obj.docstring.value)
