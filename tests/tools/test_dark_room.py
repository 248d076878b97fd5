"""Dark Room: its end points, which are exact, and what is recorded there."""

import numpy as np
import pytest

from data.agents.dark_room import MOVES, ROOMS, one_hot, record
from data.agents.trajectory_file import TrajectoryFile
from tools.make_dark_room import main, make


@pytest.mark.parametrize(
    ("name", "worst", "best"), [("10x10", 1.0, 91.99), ("9x9", 20 / 81, 1340 / 81)]
)
def test_end_points_are_those_of_the_papers(name, worst, best):
    room = ROOMS[name]
    assert room.random_return().mean() == pytest.approx(worst, abs=1e-9)
    assert room.best_return(room.goals).mean() == pytest.approx(best, abs=1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ROOMS)
def test_the_best_and_chance_get_what_is_computed(name):
    room, rng = ROOMS[name], np.random.default_rng(1)
    never = np.zeros(len(room.goals))
    best = record(room, room.goals, never, never, rng)
    returns = best.rewards.sum(axis=1)
    np.testing.assert_array_equal(returns, room.best_return(room.goals))
    np.testing.assert_array_equal(best.actions, best.best_actions)
    goals, always = np.repeat(room.goals, 400, axis=0), np.ones(400 * len(room.goals))
    drawn = record(room, goals, 0 * always, always, rng)
    mean = drawn.rewards.sum(axis=1).reshape(-1, 400).mean(axis=1)
    # Neighbours of the start are reached most, so in shares of the largest.
    expected = room.random_return()
    assert np.abs(mean - expected).max() < 0.15 * expected.max()


def test_places_follow_from_moves_and_walls_hold():
    room, rng = ROOMS["9x9"], np.random.default_rng(2)
    goals = room.goals[rng.integers(81, size=50)]
    seen = record(room, goals, rng.random(50), rng.random(50), rng)
    assert (seen.places[:, 0] == 4).all()
    nexts = np.clip(seen.places + MOVES[seen.actions], 0, 8)
    np.testing.assert_array_equal(seen.places[:, 1:], nexts[:, :-1])
    reached = (nexts == goals[:, None]).all(axis=-1)
    np.testing.assert_array_equal(seen.rewards, reached)
    nearer = np.abs(goals[:, None] - seen.places).sum(axis=-1)
    best = np.abs(goals[:, None] - room.move(seen.places, seen.best_actions))
    np.testing.assert_array_equal(best.sum(axis=-1), np.maximum(nearer - 1, 0))


def test_files_have_worlds_targets_and_histories_that_rise(tmp_path):
    file = make("9x9", "history", 30, 0, tmp_path / "history")
    assert len(file.returns) == 81 * 30 and file.has_targets
    np.testing.assert_array_equal(file.worlds, np.repeat(np.arange(81), 30))
    assert file.index["worlds_described"][10] == {"goal": [1, 1]}
    by_progress = file.returns.reshape(81, 30).mean(axis=0)
    assert by_progress[:5].mean() < 2 and by_progress[28:].mean() > 16.5
    steps = file.steps[:].reshape(-1, 20, 18 + 5 + 5 + 1)
    row, column, action, best, _ = np.split(steps, [9, 18, 23, 28], axis=-1)
    assert all((x.sum(axis=-1) == 1).all() for x in (row, column, action))
    assert (row[:, 0, 4] == 1).all() and (column[:, 0, 4] == 1).all()
    goes_down = action[:, :-1, 2] == 1  # in the first axis
    moved = row[:, 1:].argmax(axis=-1) - row[:, :-1].argmax(axis=-1)
    assert (moved[goes_down] >= 0).all() and (moved[goes_down] == 1).any()
    np.testing.assert_array_equal(action[29::30], best[29::30])
    assert one_hot(np.array([3])).tolist() == [[0, 0, 0, 1, 0]]


def test_the_same_seed_makes_the_same_file_and_none_is_overwritten(tmp_path, capsys):
    arguments = ["--room", "9x9", "--recorded", "exploration", "--episodes", "3"]
    outputs = [tmp_path / name for name in ("one", "two", "other")]
    for output, seed in zip(outputs, "110", strict=True):
        options = ["--output", str(output), "--seed", seed]
        assert main([*arguments, *options]) == 0
    assert "243 episodes of 81 worlds" in capsys.readouterr().out
    one, two, other = (TrajectoryFile.open(output).steps[:] for output in outputs)
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()
    assert main([*arguments, "--output", str(outputs[0])]) != 0
    assert "exists" in capsys.readouterr().err
