"""Models of today's families in the sizes of tests: the fields in which they differ."""

from typing import Any

from tests.cases import table

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}}
"""Fields of the config by name."""
for _name, _field, _value in table("models.txt", "family"):
    FAMILIES.setdefault(_name, {})[_field] = _value
FAMILIES["every_part"] = FAMILIES["gpt_oss"] | FAMILIES["gemma3"] | FAMILIES["gemma2"]
