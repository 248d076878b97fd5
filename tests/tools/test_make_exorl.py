import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.episodes import BadEpisode, read_episode
from data.agents.exorl import Selection, pack
from data.agents.relabel import computed_rewards
from tools.lib.exorl.policy_search import Family, search, stratify
from tools.make_exorl import Recipe, main, make

FEW = Recipe("cartpole", ("swingup",), episodes=3, seed=3, search_episodes=2)


def made(directory, recipe=FEW, processes=1, **changes):
    return make(dataclasses.replace(recipe, **changes), directory, processes)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return made(tmp_path_factory.mktemp("data"), action_repeat=8)


def meta_of(buffer):
    return json.loads((buffer.directory / "meta.json").read_text())


def contents(buffer):
    files = [path for path in buffer.directory.rglob("*") if path.is_file()]
    return {path.relative_to(buffer.directory): path.read_bytes() for path in files}


@pytest.mark.thorough
def test_the_same_seed_makes_the_same_bytes_which_are_kept(few, tmp_path):
    before = contents(few)
    again = contents(made(tmp_path, processes=2, action_repeat=8))
    assert len(again) == 4 and before == again
    other = contents(made(tmp_path / "other", seed=4, episodes=1))
    episode = Path("buffer/episode_000000_1000.npz")
    assert other[episode] != before[episode]
    with pytest.raises(FileExistsError, match="es_replay already exists and is left"):
        made(few.root)
    assert contents(few) == before


@pytest.mark.thorough
def test_rewards_are_those_of_the_first_task(tmp_path):
    recipe = Recipe("walker", ("walk", "stand"), 2, 0, 2, noise_share=1.0)
    buffer = made(tmp_path, recipe)
    meta = meta_of(buffer)
    assert meta["stored_task"] == "walk"
    assert [row["task"] for row in meta["episodes"]] == ["walk", "stand"]
    of_other = read_episode(buffer.scan()[1], "walker")
    as_stored = computed_rewards(Environment("walker", "walk"), of_other)
    assert np.abs(as_stored - of_other.reward[1:, 0]).max() < 1e-6
    as_gathered = computed_rewards(Environment("walker", "stand"), of_other).sum()
    assert meta["episodes"][1]["return"] == pytest.approx(as_gathered, rel=1e-5)
    assert as_gathered > of_other.reward[1:, 0].sum() + 1


@pytest.mark.thorough
def test_cap_keeps_good_episodes_out(tmp_path, capsys):
    few = "--episodes 4 --search-episodes 8 --seed 3 --processes 1 --cap 0.6"
    arguments = ["--domain", "cartpole", "--output", str(tmp_path), *few.split()]
    assert main(arguments) == 0
    directory = tmp_path / "cartpole" / "es_replay"
    told = capsys.readouterr().out
    assert told.startswith("swingup: returns 0% ") and f"to {directory}" in told
    meta = json.loads((directory / "meta.json").read_text())
    best = meta["search_returns"]["swingup"]["100%"]
    returns = [row["return"] for row in meta["episodes"]]
    assert len(returns) == 4 and max(returns) <= 0.6 * best + 1e-3


def test_actions_are_held_and_packed_as_one(few, tmp_path):
    one = pack(few, "swingup", tmp_path / "one")
    eight = pack(few, "swingup", tmp_path / "eight", Selection(action_repeat=8))
    assert (one.action_repeat, eight.action_repeat) == (1, 8)
    assert one.index["generator"] == meta_of(few)
    assert one.index["largest_difference_from_stored"] < 1e-6
    of_episode = [row["return"] for row in meta_of(few)["episodes"]]
    np.testing.assert_allclose(one.returns, of_episode, rtol=1e-6)
    assert eight.lengths.tolist() == [125] * 3
    np.testing.assert_allclose(eight.returns, one.returns, rtol=1e-6)
    np.testing.assert_array_equal(eight.steps[:][:, :-1], one.steps[:][::8, :-1])
    actions = one.steps[:][:, 5].reshape(-1, 8)
    assert (actions == actions[:, :1]).all() and (np.diff(actions[:, 0]) != 0).any()
    with pytest.raises(BadEpisode, match="action 9 differs .* action_repeat=3"):
        pack(few, "swingup", tmp_path / "three", Selection(action_repeat=3))


def test_search_climbs_and_keeps_all_that_it_tried():
    top, begun = np.array([1.0, -2, 3]), []

    def bowl(policies, seeds):
        begun.append(seeds.reshape(-1, 2))
        return (-((policies - top) ** 2).sum(axis=1)).tolist()

    family = Family(np.zeros(3), 0.2, 0.3, None)
    found = search(bowl, family, 640, np.random.default_rng(0))
    assert found.parameters.shape == (640, 3) and found.returns.shape == (640,)
    first, last = found.returns[:32].mean(), found.returns[-32:].mean()
    assert first < -12 and last > -1
    distances = ((found.parameters - top) ** 2).sum(axis=1)
    np.testing.assert_allclose(found.returns, -distances)
    forth, back = np.concatenate(begun).T
    assert (forth == back).all() and len(set(forth.tolist())) == 320
    # Returns that are all alike lead nowhere.
    flat = search(lambda p, _: [0.0] * len(p), family, 64, np.random.default_rng(0))
    assert abs(flat.parameters[32:].mean()) < 0.1
    with pytest.raises(ValueError, match="none of 2 policies returned 1 or less"):
        stratify(np.array([2.0, 3.0]), 1.0)
