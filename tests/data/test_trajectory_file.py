import json

import numpy as np
import pytest

from data.agents.trajectory_file import (
    TrajectoryFile,
    TrajectoryWriter,
    identify,
    top_episodes,
)
from tests.cases import table
from tests.data.test_packed import overwrite
from tests.fuzzing import altered, fuzz, set_field


def some_episodes(lengths):
    rng = np.random.default_rng(len(lengths))
    return [
        (
            rng.normal(5, 2, (steps, 3)).astype(np.float32),
            rng.uniform(-1, 1, (steps, 2)).astype(np.float32),
            rng.uniform(size=steps).astype(np.float32),
        )
        for steps in lengths
    ]


def write(directory, episodes, about=None):
    with TrajectoryWriter(directory, {} if about is None else about) as writer:
        for episode in episodes:
            writer.write(*episode)
    return directory


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [([7, 7, 7], (3, 7, 6)), ([4, 9, 1], (14, 6)), ([5], (1, 5, 6))],
)
def test_episodes_come_back(tmp_path, lengths, shape):
    episodes = some_episodes(lengths)
    directory = write(tmp_path / "run", episodes, {"task": "run"})
    assert np.load(directory / "steps.npy").shape == shape
    file = TrajectoryFile.open(directory)
    assert file.lengths.tolist() == lengths
    assert file.offsets.tolist() == [0, *np.cumsum(lengths)]
    assert (file.observation_size, file.action_size) == (3, 2)
    assert file.index["task"] == "run"
    assert file.steps.dtype == np.float32
    expected = np.concatenate([np.column_stack(episode) for episode in episodes])
    np.testing.assert_array_equal(file.steps[:], expected)
    returns = [reward.sum(dtype=np.float64) for *_, reward in episodes]
    np.testing.assert_allclose(file.returns, returns, rtol=1e-12)


def test_observations_are_described_over_all_steps(tmp_path):
    # Far from 0 and close together, where the difference of squares has no digits left.
    episodes = [(o + 1e4, a, r) for o, a, r in some_episodes([50, 3, 200])]
    file = TrajectoryFile.open(write(tmp_path / "run", episodes))
    observations = np.concatenate([o for o, *_ in episodes]).astype(np.float64)
    np.testing.assert_allclose(file.observation_mean, observations.mean(0), rtol=1e-6)
    np.testing.assert_allclose(file.observation_std, observations.std(0), rtol=1e-6)


@pytest.mark.parametrize("shapes, match", table("data.txt", "shapes"))
def test_episodes_of_other_shapes_are_refused(tmp_path, shapes, match):
    names = "observation", "action", "reward", "target"
    named = zip(names, shapes, strict=False)
    episode = {name: np.full(shape, 0.25) for name, shape in named}
    writer = TrajectoryWriter(tmp_path / "run", {})
    with pytest.raises(ValueError, match=f"episode 1 has .*{match}"), writer:
        writer.write(*some_episodes([3])[0])
        writer.write(**episode)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "value", "match"),
    # The last is too large for Python to read in a table.
    [*table("data.txt", "index"), ("action_size", 10**400, "no header of 128 bytes")],
)
def test_index_of_another_form_is_refused(tmp_path, field, value, match):
    directory = write(tmp_path / "run", some_episodes([7, 7]))
    set_field(directory / "index.json", field, value)
    if value == []:
        set_field(directory / "index.json", "returns", [])
    with pytest.raises(ValueError, match=rf"index\.json.*{match}.*pack"):
        TrajectoryFile.open(directory)


def test_a_number_that_is_not_finite_is_neither_written_nor_read(tmp_path):
    (observation, action, reward), *_ = episodes = some_episodes([4, 5, 3])
    spoilt = observation.copy()
    spoilt[2, 1] = np.inf
    with pytest.raises(ValueError, match="episode 1 has .* not finite .* in step 2"):
        write(tmp_path / "run", [episodes[0], (spoilt, action, reward)])
    assert list(tmp_path.iterdir()) == []
    directory = write(tmp_path / "run", episodes)
    overwrite(directory / "steps.npy", 128 + (4 + 2) * 6 * 4, np.array(np.nan, "<f4"))
    file = TrajectoryFile.open(directory)
    assert file.read(np.array([[5, 0], [7, 11]])).shape == (2, 2, 6)
    match = r"steps\.npy has a number that is not finite in step 6 \(in episode 1\)"
    with pytest.raises(ValueError, match=match):
        file.read(np.array([5, 6, 7]))
    with pytest.raises(ValueError, match="not what was written, by its digest"):
        identify(directory)


def test_best_episodes_hold_a_tenth_of_the_steps():
    returns, lengths = np.array([5.0, 9, 1, 7, 8]), np.array([10, 5, 60, 5, 20])
    assert top_episodes(returns, lengths).tolist() == [1]
    assert top_episodes(returns, lengths, 0.25).tolist() == [1, 4]
    assert top_episodes(returns, lengths, 0.3).tolist() == [1, 4, 3]
    assert top_episodes(returns, lengths, 0.01).tolist() == [1]
    with pytest.raises(ValueError, match="episode 2 has no return"):
        top_episodes(np.array([1, 2, np.nan, 3, 4]), lengths)
    with pytest.raises(ValueError, match="of 5 episodes .* of which 4 have a length"):
        top_episodes(returns, lengths[1:])
    assert top_episodes(returns, lengths, 1.0).tolist() == [1, 4, 3, 0, 2]
    for share, count in (0, 5), (-1, 5), (1.5, 5), (0.1, 0):
        with pytest.raises(ValueError, match=f"share={share} of {count} episodes"):
            top_episodes(returns[:count], lengths[:count], share)
    equal = np.ones(20)
    assert top_episodes(equal, np.full(20, 1000)).tolist() == [19, 18]


@pytest.mark.parametrize("attempts", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_altered_index_is_what_it_says_or_refused(tmp_path, attempts):
    directory = write(tmp_path / "run", some_episodes([3, 3, 4]))
    path = directory / "index.json"
    index, steps = json.loads(path.read_text()), TrajectoryFile.open(directory).steps[:]

    def attempt(rng):
        path.write_bytes(altered(index, rng).encode("utf-8", "surrogatepass"))
        identify(directory)
        file = TrajectoryFile.open(directory)
        return file, file.read(np.arange(10))

    def check(found):
        file, read = found
        said = json.loads(path.read_text())
        np.testing.assert_array_equal(read, steps)
        assert (file.observation_size, file.action_size) == (3, 2)
        assert type(file.action_repeat) is int and file.action_repeat > 0
        assert file.lengths.tolist() == said["lengths"]
        for name in ("returns", "observation_mean", "observation_std"):
            values = getattr(file, name)
            assert np.isfinite(values).all()
            expected = np.array(said[name], np.float64)
            np.testing.assert_allclose(values, expected, rtol=1e-6)

    fuzz(attempts, attempt, check, most_bytes=20 << 20)
