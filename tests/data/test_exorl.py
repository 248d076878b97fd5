import hashlib
import json
import logging
import shutil

import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.episodes import BadEpisode, Buffer, read_episode, write_episode
from data.agents.exorl import Selection, describe, pack
from data.agents.hidden_physics import HiddenPhysics
from data.agents.trajectory_file import TrajectoryFile
from tests.cases import table
from tests.small.episodes import made_up_buffer, rolled_out

STORED = Selection("stored")


@pytest.fixture(scope="module")
def cartpole():
    return Environment("cartpole", "balance")


@pytest.fixture
def real(tmp_path, cartpole):
    """A buffer of real episodes of a cart-pole, of 20 steps each."""
    buffer = Buffer(tmp_path / "data", "cartpole", "random")
    folder = buffer.directory / "buffer"
    folder.mkdir(parents=True)
    for number in range(3):
        path = folder / f"episode_{number}_20.npz"
        write_episode(rolled_out(path, cartpole, 20, seed=number))
    return buffer


def damage(path):
    path.write_bytes(path.read_bytes()[:-50])


def test_packed_steps_are_aligned_and_kept(tmp_path):
    buffer = made_up_buffer(tmp_path / "data", "walker", [6, 4])
    file = pack(buffer, "run", tmp_path / "cache", STORED)
    assert file.directory == tmp_path / "cache" / "walker" / "made_up" / "run"
    first, second = (read_episode(path, "walker") for path in buffer.scan())
    # Seen before the action, which gives the reward of the next row.
    row = np.concatenate([first.observation[2], first.action[3], first.reward[3]])
    steps = file.steps[:]
    np.testing.assert_array_equal(steps[2], row)
    np.testing.assert_array_equal(steps[6:, :24], second.observation[:-1])
    np.testing.assert_array_equal(steps[6:, -1], second.reward[1:, 0])
    np.testing.assert_allclose(file.returns[1], second.reward[1:].sum(), rtol=1e-6)
    with pytest.raises(FileExistsError, match="run already exists and is left"):
        pack(buffer, "run", tmp_path / "cache", STORED)
    again = TrajectoryFile.open(file.directory)
    np.testing.assert_array_equal(again.steps[:], steps)


def test_index_says_what_was_packed(real, tmp_path):
    meta = {"generator": "mine", "seed": 3}
    (real.directory / "meta.json").write_text(json.dumps(meta))
    index = pack(real, "balance", tmp_path / "cache").index
    paths = real.scan()
    sources = index["sources"]
    assert [source["file"] for source in sources] == [path.name for path in paths]
    for path, source in zip(paths, sources, strict=True):
        content = path.read_bytes()
        facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        facts["steps"] = 20
        assert source == {"file": path.name} | facts
    assert (index["domain"], index["algorithm"]) == ("cartpole", "random")
    assert (index["task"], index["relabelling"]) == ("balance", "exact")
    assert index["generator"] == meta and index["bad_files"] == []
    assert index["worlds"] == [0, 0, 0] and index["worlds_described"] == [None]
    assert index["versions"]["dm_control"] == "1.0.50"
    assert set(index["versions"]) == {"dm_control", "mujoco", "numpy"}


def test_rewards_are_computed_as_asked_for(real, tmp_path):
    exact, exorl, stored = (
        pack(real, "balance", tmp_path / name, Selection(name))
        for name in ("exact", "exorl", "stored")
    )
    np.testing.assert_allclose(exact.steps[:], stored.steps[:], atol=1e-6)
    np.testing.assert_array_equal(exorl.steps[:][:, :-1], stored.steps[:][:, :-1])
    higher = exorl.steps[:][:, -1] / stored.steps[:][:, -1]
    assert higher.min() >= 1 and 1.1 < higher.max() <= 1.25 + 1e-6
    difference = "largest_difference_from_stored"
    differences = [file.index[difference] for file in (exact, exorl, stored)]
    assert differences[0] < 1e-6 and differences[1] > 0.05 and differences[2] == 0


@pytest.mark.parametrize("off", [0, 0.01])
def test_a_wrong_file_is_named_and_nothing_is_left(real, tmp_path, off):
    path = real.scan()[1]
    episode = read_episode(path, "cartpole")
    episode.observation[:] += off
    write_episode(episode)
    if not off:
        damage(path)
    far = r"observations are 0\.01 off .*cartpole.*0\.0001: .*model"
    said = far if off else "unreadable npz"
    with pytest.raises(BadEpisode, match=rf"_1_20\.npz: {said}"):
        pack(real, "balance", tmp_path / "cache")
    left = (tmp_path / "cache").rglob("*")
    assert [path.name for path in left] == ["cartpole", "random"]


def test_a_state_that_the_simulator_refuses_is_named(tmp_path):
    buffer = made_up_buffer(tmp_path / "data", "walker", [8])
    (path,) = buffer.scan()
    episode = read_episode(path, "walker")
    episode.physics[:] = 1e30
    write_episode(episode)
    with pytest.raises(BadEpisode, match="_8.npz: the simulator refuses the state"):
        pack(buffer, "run", tmp_path / "cache")


@pytest.fixture(scope="module")
def recorded_worlds(tmp_path_factory):
    """Worlds of a weak and of a strong motor, of 20 steps each."""
    root = tmp_path_factory.mktemp("worlds")
    for number, strength in enumerate((0.5, 2.0)):
        hidden = HiddenPhysics(strength=strength)
        folder = Buffer(root, "cartpole", f"worlds/world_{number:03d}").directory
        (folder / "buffer").mkdir(parents=True)
        meta = json.dumps({"hidden_physics": vars(hidden)})
        (folder / "meta.json").write_text(meta)
        path = folder / "buffer" / "episode_0_20.npz"
        environment = Environment("cartpole", "balance", hidden)
        write_episode(rolled_out(path, environment, 20))
    return root


@pytest.fixture
def worlds(recorded_worlds, tmp_path):
    shutil.copytree(recorded_worlds, tmp_path / "data")
    return Buffer(tmp_path / "data", "cartpole", "worlds")


def test_worlds_are_packed_by_their_numbers(worlds, tmp_path):
    names = [world.algorithm for world in worlds.worlds()]
    assert names == ["worlds/world_000", "worlds/world_001"]
    both = pack(worlds, "balance", tmp_path / "cache")
    assert both.worlds.tolist() == [0, 1]
    assert [w["strength"] for w in both.index["worlds_described"]] == [0.5, 2.0]
    sources = [source["file"] for source in both.index["sources"]]
    assert sources == ["world_000/episode_0_20.npz", "world_001/episode_0_20.npz"]
    second = pack(worlds.worlds()[1], "balance", tmp_path / "cache")
    assert second.directory == both.directory.parent / "world_001" / "balance"
    assert second.index["worlds_described"] == both.index["worlds_described"][1:]
    np.testing.assert_array_equal(second.steps[:], both.steps[:][20:])
    few = Selection("stored", max_transitions=20)  # of each world
    assert len(pack(worlds, "balance", tmp_path / "few", few).returns) == 2


def test_episodes_of_another_world_are_refused(worlds, tmp_path):
    one, other = (world.directory / "meta.json" for world in worlds.worlds())
    other.write_text(one.read_text())
    match = r"world_001/.*physics are 0\.\d+ off .*strength=0\.5.*another world"
    with pytest.raises(BadEpisode, match=match):
        pack(worlds, "balance", tmp_path / "cache")
    assert len(pack(worlds, "balance", tmp_path / "any", STORED).returns) == 2
    other.write_text(json.dumps({"hidden_physics": {"strength": 0}}))
    with pytest.raises(ValueError, match="strength=0 must be a number above 0"):
        pack(worlds, "balance", tmp_path / "cache")
    other.write_text("{")
    with pytest.raises(ValueError, match=r"meta\.json is not JSON .*remove it"):
        pack(worlds, "balance", tmp_path / "cache", STORED)
    one.parent.rename(one.parent.with_name("world_007"))
    with pytest.raises(FileNotFoundError, match="no directory .*world_000"):
        pack(worlds, "balance", tmp_path / "cache")


def test_one_bad_file_in_a_hundred_may_be_skipped(tmp_path, caplog):
    buffer = made_up_buffer(tmp_path / "data", "cartpole", [2] * 100)
    odd = buffer.scan()[50].with_name("odd.npz")
    buffer.scan()[50].rename(odd)
    with caplog.at_level(logging.WARNING):
        file = pack(buffer, "swingup", tmp_path / "a", Selection("stored", "skip"))
    reason = "name is not episode_<index>_<length>.npz"
    assert file.index["bad_files"] == [{"file": "odd.npz", "reason": reason}]
    assert len(file.returns) == 99 == len(file.index["sources"])
    assert caplog.messages == [f"skipped {odd}: {reason}"]
    assert "bad files skipped: 1" in describe(file)
    damage(buffer.scan()[3])
    match = r"2 of 100 files of .*made_up are bad, more than 1%; .*_000003_2\.npz: "
    with pytest.raises(ValueError, match=match):
        pack(buffer, "swingup", tmp_path / "b", Selection("stored", "skip"))
    assert not list((tmp_path / "b").glob("**/*.npy"))


def test_whole_episodes_are_taken_up_to_a_number_of_steps(tmp_path):
    buffer = made_up_buffer(tmp_path / "data", "cartpole", [5, 5, 3, 5])
    for most, episodes in (1, 1), (12, 2), (13, 3), (17, 3), (18, 4), (99, 4):
        selection = Selection("stored", max_transitions=most)
        file = pack(buffer, "swingup", tmp_path / f"{most}", selection)
        assert len(file.returns) == episodes, most


@pytest.mark.parametrize("domain, task, relabelling, match", table("data.txt", "task"))
def test_unknown_tasks_are_refused_before_files_are_read(
    tmp_path, domain, task, relabelling, match
):
    buffer, selection = Buffer(tmp_path, domain, "rnd"), Selection(relabelling)
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        pack(buffer, task, tmp_path, selection)


def test_description_gives_returns_and_sizes(tmp_path):
    buffer = made_up_buffer(tmp_path / "data", "cartpole", [2] * 11)
    for number, path in enumerate(buffer.scan()):
        episode = read_episode(path, "cartpole")
        episode.reward[1:] = number / 2
        write_episode(episode)
    text = describe(pack(buffer, "swingup", tmp_path / "cache", STORED))
    assert "11 episodes of 2 to 2 steps, 22 steps" in text
    quantiles = [float(value) for value in text.splitlines()[3].split()]
    assert quantiles == [0, 1, 2.5, 5, 7.5, 9, 10]
