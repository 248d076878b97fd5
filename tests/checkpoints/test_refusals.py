"""What checkpoints could not give back is refused, by name."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.checkpoints.small_state import Told, checkpoints

ONE = jnp.ones(3)


@pytest.mark.parametrize(
    ("step", "state", "message"),
    [
        *(
            (step, {"a": ONE}, f"step={step!r} must be at least 0, and whole")
            for step in (2.5, -1, True, "5", None)
        ),
        (1, {}, "the state holds no array"),
        (1, {"a": ONE, "rate": 1.5}, "rate of the state is 1.5: give an array"),
        (1, {"name": "x"}, "name of the state is 'x': give an array"),
        (
            1,
            {"a": ONE.astype("complex64")},
            "a of the state is of type complex64: give real numbers",
        ),
        (1, {"a": ONE.astype("int4")}, "a of the state is of type int4"),
        (1, {"key": jax.random.key(0)}, "key of the state is of type key<fry>"),
        (1, {"a": jnp.ones((0, 3))}, r"a of the state has shape \[0, 3\], without an"),
        (1, {"a": {"b": ONE}, "a.b": ONE}, "a.b of the state is the name of 2 arrays"),
    ],
)
def test_what_would_not_come_back_is_refused_and_not_written(
    tmp_path: Path, told: Told, step: Any, state: Any, message: str
) -> None:
    with checkpoints(tmp_path, told) as saved:
        with pytest.raises(ValueError, match=message):
            saved.save(step, state)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ({"a": jax.ShapeDtypeStruct((3,), np.float32)}, "a of"),
        ({"a": np.ones(3)}, "a of"),
        ({"a": 5}, "a of"),
        (5, "of"),
    ],
)
def test_what_says_no_place_is_refused(
    tmp_path: Path, told: Told, wanted: Any, name: str
) -> None:
    message = f"{name} abstract_state has no sharding: give"
    with checkpoints(tmp_path, told) as saved:
        saved.save(1, {"a": ONE})
        with pytest.raises(ValueError, match=message):
            saved.restore(wanted)
