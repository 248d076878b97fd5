import hashlib
from unittest import mock

import numpy as np
import pytest

from data.agents import exorl
from data.agents.environments import Environment
from data.agents.episodes import BadEpisode, Buffer, read_episode, write_episode
from data.agents.exorl import Selection, pack
from tests.cases import table
from tests.small.episodes import rolled_out, rolled_out_buffer


@pytest.fixture(scope="module")
def cartpole():
    return Environment("cartpole", "balance")


@pytest.fixture
def real(tmp_path, cartpole):
    """A buffer of real episodes of a cart-pole, of 20 steps each."""
    return rolled_out_buffer(tmp_path / "data", cartpole, [20] * 3)


def packed(buffer, task, *options):
    (file,) = pack(buffer, [task], *options)
    return file


def test_packed_steps_are_aligned_and_kept(tmp_path, cartpole):
    buffer = rolled_out_buffer(tmp_path / "data", cartpole, [6, 4])
    file = packed(buffer, "balance", tmp_path / "cache")
    assert file.directory == tmp_path / "cache" / "cartpole" / "random" / "balance"
    first, second = (read_episode(path, "cartpole") for path in buffer.scan())
    # Seen before the action, which gives the reward of the next row.
    row = np.concatenate([first.observation[2], first.action[3], first.reward[3]])
    steps = file.steps[:]
    np.testing.assert_allclose(steps[2], row, rtol=1e-6)
    np.testing.assert_array_equal(steps[6:, :5], second.observation[:-1])
    np.testing.assert_allclose(steps[6:, -1], second.reward[1:, 0], rtol=1e-6)
    np.testing.assert_allclose(file.returns[1], second.reward[1:].sum(), rtol=1e-6)
    with pytest.raises(FileExistsError, match="balance already exists and is left"):
        packed(buffer, "balance", tmp_path / "cache")


def test_files_are_read_once_for_all_tasks_and_indices_say_what_is_packed(
    real, tmp_path, monkeypatch
):
    alone = [packed(real, task, tmp_path / "one") for task in ("balance", "swingup")]
    read = mock.Mock(side_effect=exorl.read_episode)
    monkeypatch.setattr(exorl, "read_episode", read)
    files = pack(real, ["balance", "swingup"], tmp_path / "both")
    paths = real.scan()
    assert [call.args[0] for call in read.call_args_list] == paths
    for file, other in zip(files, alone, strict=True):
        np.testing.assert_array_equal(file.steps[:], other.steps[:])
        assert file.index == other.index
    index = files[0].index
    assert [source["file"] for source in index["sources"]] == [p.name for p in paths]
    for path, source in zip(paths, index["sources"], strict=True):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        facts = {"bytes": path.stat().st_size, "sha256": digest, "steps": 20}
        assert source == {"file": path.name} | facts
    assert (index["domain"], index["algorithm"]) == ("cartpole", "random")
    assert (index["task"], index["worlds"]) == ("balance", [0, 0, 0])
    assert index["largest_difference_from_stored"] < 1e-6
    assert set(index["versions"]) == {"dm_control", "mujoco", "numpy"}


def test_tasks_of_a_family_are_worlds_of_the_same_steps(tmp_path):
    """And their rewards are those of an environment of that world."""
    first = Environment("point_mass", "goals", np.zeros((1, 2)))
    buffer = rolled_out_buffer(tmp_path / "data", first, [40, 40])
    options = Selection(worlds=3, action_repeat=1, seed=2)
    file = packed(buffer, "goals", tmp_path / "cache", options)
    assert file.worlds.tolist() == [0, 0, 1, 1, 2, 2] and len(file.returns) == 6
    assert np.load(file.directory / "rewards.npy").shape == (2, 3, 40)
    targets = [world["target"] for world in file.index["worlds_described"]]
    assert np.ptp(targets, axis=0).min() > 0.01
    rewards = file.read(np.arange(240))[:, -1].reshape(3, 2, 40)
    for world, target in enumerate(targets):
        environment = Environment("point_mass", "goals", np.array([target]))
        for number in range(2):
            path = tmp_path / f"episode_{number}_40.npz"
            episode = rolled_out(path, environment, 40, seed=number)
            given = episode.reward[1:, 0]
            np.testing.assert_allclose(rewards[world, number], given, atol=1e-6)
    # Beside the steps stand an expert's actions: straight to the target, braking.
    steps = file.read(np.arange(240)).reshape(3, 80, 9)
    ahead = steps[..., :2] + 0.3 * steps[..., 2:4]
    wanted = np.clip((np.array(targets)[:, None] - ahead) / 0.1, -1, 1)
    np.testing.assert_allclose(steps[..., 6:8], wanted, atol=1e-6)
    assert file.has_targets and (np.abs(wanted) < 1).any()
    sums = rewards.sum(axis=-1, dtype=np.float64).ravel()
    np.testing.assert_allclose(file.returns, sums, rtol=1e-6)
    more = packed(buffer, "goals", tmp_path / "more", Selection(worlds=4, seed=2))
    described = [each.index["worlds_described"] for each in (file, more)]
    assert described[1][:3] == described[0]


FAR = r"observations are 0\.01 off .*cartpole.*0\.0001: .*model"


@pytest.mark.parametrize(("off", "said"), [(0, "unreadable npz"), (0.01, FAR)])
def test_a_wrong_file_is_named_and_nothing_is_left(real, tmp_path, off, said):
    path = real.scan()[1]
    episode = read_episode(path, "cartpole")
    episode.observation[:] += off
    write_episode(episode)
    if not off:
        path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(BadEpisode, match=rf"1_20\.npz: {said}"):
        packed(real, "balance", tmp_path / "cache")
    left = (tmp_path / "cache").rglob("*")
    assert [path.name for path in left] == ["cartpole", "random"]


def test_a_state_that_the_simulator_refuses_is_named(tmp_path):
    buffer = rolled_out_buffer(tmp_path / "data", Environment("walker", "run"), [2])
    (path,) = buffer.scan()
    episode = read_episode(path, "walker")
    episode.physics[:] = 1e30
    write_episode(episode)
    with pytest.raises(BadEpisode, match="_2.npz: the simulator refuses the state"):
        packed(buffer, "run", tmp_path / "cache")


def test_whole_episodes_are_taken_up_to_a_number_of_steps(tmp_path, cartpole):
    buffer = rolled_out_buffer(tmp_path / "data", cartpole, [5, 5, 3, 5])
    for most, episodes in (1, 1), (12, 2), (13, 3), (17, 3), (18, 4), (99, 4):
        selection = Selection(max_transitions=most)
        file = packed(buffer, "balance", tmp_path / f"{most}", selection)
        assert len(file.returns) == episodes, most


@pytest.mark.parametrize("domain, task, match", table("data.txt", "task"))
def test_unknown_tasks_are_refused_before_files_are_read(tmp_path, domain, task, match):
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        packed(Buffer(tmp_path, domain, "rnd"), task, tmp_path)
