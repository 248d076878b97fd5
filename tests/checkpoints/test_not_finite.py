"""States that are not finite are neither saved nor taken."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints.small_state import (
    LEAVES_COROUTINES,
    Told,
    abstract,
    assert_restores,
    checkpoints,
    content,
    settle,
    state,
)
from training.weights import SavedParameters

pytestmark = LEAVES_COROUTINES


def broken(step: int, value: float = np.nan) -> Any:
    """A state whose matrix has one element that is not finite."""
    changed = state(step)
    changed["params"]["matrix"] = changed["params"]["matrix"].at[3, 5].set(value)
    return changed


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    ("value", "found"), [(np.nan, "1 nan"), (np.inf, "1 inf"), (-np.inf, "1 inf")]
)
def test_a_state_that_is_not_finite_is_not_saved_and_nothing_goes(
    directory: Path, told: Told, value: float, found: str
) -> None:
    before = content(directory)
    with checkpoints(directory, told, keep=1) as saved:
        said = f"step 40 is not saved: params.matrix holds {found}$"
        with pytest.raises(ValueError, match=said):
            saved.save(40, broken(40, value))
        moments = np.array([1, value], np.float32)
        with pytest.raises(ValueError, match=f"optimizer_state.nu holds {found}$"):
            saved.save(40, state(40) | {"optimizer_state": {"nu": moments}})
    assert content(directory) == before and not told


@pytest.fixture
def with_nan(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a trainer saved that did not look."""
    with monkeypatch.context() as patch:
        patch.setattr("training.stored_step.not_finite", lambda found: "")
        with checkpoints(directory, Told(), keep=4) as saved:
            saved.save(40, broken(40))
    return directory


@pytest.mark.thorough
def test_a_stored_step_that_is_not_finite_is_set_aside(
    with_nan: Path, told: Told
) -> None:
    with pytest.raises(ValueError, match="step 40 of .* is damaged: .* holds 1 nan"):
        SavedParameters(with_nan.parent).restore(abstract(state(0)["params"]))
    with checkpoints(with_nan, told) as saved:
        assert_restores(saved, 30)
    assert (with_nan / "damaged" / "40").is_dir()
    (line,) = told
    assert "step 40 is damaged" in line and "params.matrix holds 1 nan" in line


@pytest.mark.thorough
def test_where_nothing_rotates_older_steps_stay_until_it_does(
    directory: Path, told: Told
) -> None:
    with checkpoints(directory, told, keep=2) as saved:
        saved.save(40, state(40), rotate=False)
        settle(saved)
        assert {path.name for path in directory.iterdir()} == {"10", "20", "30", "40"}
        saved.save(50, state(50))
    assert {path.name for path in directory.iterdir()} == {"40", "50"}


@pytest.mark.thorough
def test_steps_that_are_not_trusted_move_once_and_if_there_is_an_older_one(
    directory: Path, told: Told
) -> None:
    with checkpoints(directory, told) as saved:
        saved.distrust(5, "of no use")
        saved.distrust(31, "of no use")
        assert saved.latest_step() == 30 and not told
        saved.distrust(20, "of no use")
        assert saved.latest_step() == 10
        saved.save(20, state(20))
        saved.distrust(20, "of no use")
        assert saved.latest_step() == 20
    assert told == [
        f"WARNING: step {step} is not trusted and moves to {directory}/damaged: "
        "of no use"
        for step in (30, 20)
    ]
