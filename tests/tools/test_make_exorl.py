import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.episodes import BadEpisode, read_episode
from data.agents.exorl import Selection, pack
from data.agents.relabel import exact_rewards
from tests.processes import run_program
from tools.lib.exorl.replay import Recipe, make

CARTPOLE = Recipe("cartpole", ("swingup",), episodes=24, seed=3, search_episodes=8)
FEW = dataclasses.replace(CARTPOLE, episodes=3, search_episodes=2)


def made(directory, recipe, processes=1, **changes):
    return make(dataclasses.replace(recipe, **changes), directory, processes)


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    return made(tmp_path_factory.mktemp("data"), CARTPOLE)


def meta_of(buffer):
    return json.loads((buffer.directory / "meta.json").read_text())


def contents(buffer):
    files = [path for path in buffer.directory.rglob("*") if path.is_file()]
    return {path.relative_to(buffer.directory): path.read_bytes() for path in files}


@pytest.mark.thorough
def test_data_read_back_and_pack(cartpole, tmp_path):
    paths = cartpole.scan()
    assert [path.name for path in paths] == [
        f"episode_{number:06d}_1000.npz" for number in range(24)
    ]
    trajectories = pack(cartpole, "swingup", tmp_path)
    assert trajectories.lengths.tolist() == [1000] * 24
    assert trajectories.index["largest_difference_from_stored"] < 1e-6
    meta = meta_of(cartpole)
    assert trajectories.index["generator"] == meta
    of_episode = {row["episode"]: row["return"] for row in meta["episodes"]}
    returns = [of_episode[number] for number in range(24)]
    np.testing.assert_allclose(trajectories.returns, returns, rtol=1e-6)


@pytest.mark.thorough
def test_same_seed_makes_the_same_bytes_in_any_number_of_processes(tmp_path):
    one = contents(made(tmp_path / "one", FEW))
    two = contents(made(tmp_path / "two", FEW, processes=2))
    assert len(one) == 4 and one == two
    other = contents(made(tmp_path / "other", FEW, seed=4, episodes=1))
    episode = Path("buffer/episode_000000_1000.npz")
    assert other[episode] != one[episode]


def assert_rewards_of(environment, episode):
    difference = exact_rewards(environment, episode) - episode.reward[1:, 0]
    assert np.abs(difference).max() < 1e-6


@pytest.mark.thorough
def test_rewards_are_those_of_the_first_task(tmp_path):
    recipe = Recipe("walker", ("walk", "stand"), 2, 0, 2, noise_share=1.0)
    buffer = made(tmp_path, recipe)
    meta = meta_of(buffer)
    assert meta["stored_task"] == "walk"
    assert [row["task"] for row in meta["episodes"]] == ["walk", "stand"]
    of_other = read_episode(buffer.scan()[1], "walker")
    assert_rewards_of(Environment("walker", "walk"), of_other)
    as_gathered = exact_rewards(Environment("walker", "stand"), of_other).sum()
    assert meta["episodes"][1]["return"] == pytest.approx(as_gathered, rel=1e-5)
    assert as_gathered > of_other.reward[1:, 0].sum() + 1


@pytest.mark.thorough
def test_cap_keeps_good_episodes_out(tmp_path):
    meta = meta_of(made(tmp_path, CARTPOLE, cap=0.6, episodes=4))
    best = meta["search_returns"]["swingup"]["100%"]
    returns = [row["return"] for row in meta["episodes"]]
    assert len(returns) == 4 and max(returns) <= 0.6 * best + 1e-3


def test_actions_are_held_and_packed_as_one(tmp_path):
    buffer = made(tmp_path, FEW, episodes=2, action_repeat=8)
    one = pack(buffer, "swingup", tmp_path / "one")
    eight = pack(buffer, "swingup", tmp_path / "eight", Selection(action_repeat=8))
    assert (one.action_repeat, eight.action_repeat) == (1, 8)
    assert eight.lengths.tolist() == [125, 125]
    np.testing.assert_allclose(eight.returns, one.returns, rtol=1e-6)
    np.testing.assert_array_equal(eight.steps[:][:, :-1], one.steps[:][::8, :-1])
    actions = one.steps[:][:, 5].reshape(-1, 8)
    assert (actions == actions[:, :1]).all() and (np.diff(actions[:, 0]) != 0).any()
    with pytest.raises(BadEpisode, match="action 9 differs .* action_repeat=3"):
        pack(buffer, "swingup", tmp_path / "three", Selection(action_repeat=3))


@pytest.mark.thorough
def test_existing_data_are_kept(cartpole):
    before = contents(cartpole)
    with pytest.raises(FileExistsError, match="es_replay already exists and is left"):
        made(cartpole.root, CARTPOLE)
    assert contents(cartpole) == before
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        made(cartpole.root, CARTPOLE, processes=0)


BAD = [
    ({"tasks": ("fly",)}, "task='fly' of cartpole must be one of"),
    ({"domain": "quadruped"}, "no environment for domain='quadruped'"),
    ({"tasks": ()}, r"tasks=\(\) must be tasks"),
    ({"tasks": ("swingup", "swingup")}, "each of them once"),
    ({"episodes": 0}, "episodes=0 and .* at least 1"),
    ({"search_episodes": 0}, "search_episodes=0 must be at least 1"),
    ({"seed": -1}, "seed=-1 at least 0"),
    ({"noise_share": 1.1}, "noise_share=1.1 must be from 0 to 1"),
    ({"cap": 0.0}, "cap=0.0 above 0"),
    ({"cap": 1.5}, "cap=1.5 above 0 and up to 1"),
    ({"action_repeat": 0}, "action_repeat=0 must be at least 1"),
]


@pytest.mark.parametrize(("changes", "match"), BAD)
def test_recipes_that_make_nothing_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(CARTPOLE, **changes)


@pytest.mark.thorough
def test_program_runs_from_the_root(tmp_path):
    small = ("--episodes", "2", "--processes", "1", "--search-episodes", "2")
    command = "-m", "tools.make_exorl", "--domain", "cartpole", "--output", tmp_path
    code, told, errors = run_program(*command, *small)
    assert (code, errors) == (0, "")
    assert told.startswith("swingup: returns 0% ")
    assert f"written to {tmp_path / 'cartpole' / 'es_replay'}" in told
