"""Fuzzers: files damaged by chance, which are read rightly or refused in one line."""

import copy
import gc
import json
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEED = 19
ODD_NUMBERS = -1, 0, 2, 0.5, 1 << 31, 1 << 64, 10**400, 1e300, math.nan, math.inf
ODD_STRINGS = "", "32000", "a\nb", "../x"
ODD = None, True, *ODD_STRINGS, *ODD_NUMBERS, [], [1, "a"], {}, {"a": None}
"""Values that stand where others should."""
ODD_TEXTS = ("[" * 100_000, "9" * 5000, '{"a": 1, "a": 2}', "NaN", "", "{", "\ud83d")
"""Texts in the place of a value, which no value gives."""


def fuzz(
    attempts: int,
    attempt: Callable[[np.random.Generator], Any],
    check: Callable[[Any], None],
    most_bytes: int,
) -> Counter[str]:
    """How many attempts were `read`, and how many `refused`.

    Args:
      attempts: how many.
      attempt: damages a file and reads it; what it raises must be one ValueError or
        OSError of one line.
      check: asserts that what was read is what the file holds.
      most_bytes: of memory that attempts may take at any time.
    """
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    counts: Counter[str] = Counter()
    tracemalloc.start()
    # Errors are held by the frames that they hold: memory is what is looked for often.
    seldom = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    try:
        for _ in range(attempts):
            try:
                found = attempt(rng)
            except (ValueError, OSError) as error:
                message = str(error)
                assert message.isprintable() and 0 < len(message) < 2000, message[:300]
                counts["refused"] += 1
            else:
                check(found)
                counts["read"] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.set_threshold(*seldom)
    assert peak < most_bytes
    assert counts.total() == attempts and min(counts["read"], counts["refused"]) > 0
    return counts


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Bytes with one or a few replaced, taken out or put in, or cut off."""
    found = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        place = int(rng.integers(len(found) + 1))
        match rng.integers(6):
            case 0:
                del found[place:]
            case 1:
                del found[place : place + int(rng.integers(1, 9))]
            case 2:
                found[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                found[place : place + 1] = rng.bytes(1)
    return bytes(found)


def altered(value: Any, rng: np.random.Generator) -> str:
    """The JSON of a value in which one place has an odd value, or is no JSON at all."""
    mark = "the place"
    value = copy.deepcopy(value)
    places = list(_places(value))
    parent, key = places[rng.integers(len(places))]
    match rng.integers(6):
        case 0:
            del parent[key]
            return json.dumps(value)
        case 1:
            parent[key] = mark
            odd = ODD_TEXTS[rng.integers(len(ODD_TEXTS))]
            return json.dumps(value).replace(json.dumps(mark), odd)
        case 2 if isinstance(parent, dict):
            parent["odd"] = parent.pop(key)
        case _:
            parent[key] = ODD[rng.integers(len(ODD))]
    return json.dumps(value)


def set_field(path: Path, field: str, value: Any) -> None:
    """Sets a dotted field of a JSON file; None takes it out."""
    whole = place = json.loads(path.read_text())
    *parents, name = field.split(".")
    for parent in parents:
        place = place[parent]
    place[name] = value
    if value is None:
        del place[name]
    path.write_text(json.dumps(whole))


def _places(value: Any) -> Any:
    """Every container in a value, and a key of it."""
    if not isinstance(value, dict | list):
        return
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        yield from _places(value[key])
