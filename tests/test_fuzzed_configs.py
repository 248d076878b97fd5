"""Configs of drawn values are compiled, or refused in a line that names the field."""

import math
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest

import train
from configs import base
from tasks.config_errors import fields_by_name
from tests.runs import small_config

pytestmark = pytest.mark.slow
SEED, COUNT = 19, 600

DRAWN = {
    bool: [True, False],
    int: [-(2**31), -1, 0, 1, 2, 3, 7, 10_001, 2**31, 2**63],
    float: [-math.inf, -1.0, 0.0, 1e-300, 0.5, 2.0, 1e30, math.inf, math.nan],
    str: ["", "x", "none", " packed", "1-0", "text", "exorl", "10"],
    tuple: [(), ("x",), ("seed", "rope_theta"), ("",)],
}
# What train() does not read, where it writes, and what ends a slow test.
LEFT_OUT = ("workdir", "simulated_devices", "hosts.", "data.corpus", "guard.first")


class Compiled(Exception):
    """As far as a config comes that is not refused."""


def fault_of(error: BaseException, drawn: dict[str, Any], workdir: Path) -> str:
    """What is wrong with the answer to a config; "" where nothing is."""
    if isinstance(error, Compiled):
        return ""
    if not isinstance(error, ValueError | OSError):
        return "no refusal"
    if any(path.is_file() for path in workdir.rglob("*")):
        return "something was written"
    # What a message may call the fields, and those that they make necessary.
    words = [re.split(r"[._]", name)[-1] for name in drawn]
    words += ["trajectories", "stripe_granule", str(drawn.get("init_from"))]
    if not any(re.search(rf"\b\w*{word}\b", str(error)) for word in words):
        return "the message names none of the fields"
    return "" if len(str(error).splitlines()) == 1 else "more than a line"


def test_drawn_configs_are_compiled_or_refused_by_name(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "jit", mock.Mock(side_effect=Compiled))
    draw = random.Random(SEED)
    known = fields_by_name(base.get_config())
    names = [name for name in known if not name.startswith(LEFT_OUT)]
    outcomes, bad = Counter(), []
    for number in range(COUNT):
        chosen = draw.sample(names, draw.choice([1, 1, 2, 3]))
        drawn = {name: draw.choice(DRAWN[type(known[name])]) for name in chosen}
        workdir = tmp_path / str(number)
        with pytest.raises(BaseException) as caught:  # noqa: B017
            train.train(small_config(corpus, workdir, **drawn), lambda line: None)
        outcomes[caught.type] += 1
        if fault := fault_of(caught.value, drawn, workdir):
            bad.append(f"{fault}: {drawn}: {caught.type}: {caught.value}")
    assert bad == []
    assert outcomes[Compiled] > COUNT / 10 and outcomes[ValueError] > COUNT / 3
