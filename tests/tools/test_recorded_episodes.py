"""Recorded episodes: of policies that were searched for, of worlds, and packed."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.episodes import BadEpisode, Buffer, read_episode
from data.agents.exorl import Selection, computed_rewards, pack
from data.agents.hidden_physics import HiddenPhysics
from data.agents.trajectory_file import TrajectoryFile
from tests.episodes import made_up_buffer
from tools import make_exorl, make_worlds, pack_exorl
from tools.lib.exorl.controller import _Body, controller
from tools.lib.exorl.policy_search import Family, search, stratify
from tools.lib.exorl.rollouts import roll_out
from tools.make_exorl import Recipe

FEW = Recipe("cartpole", ("swingup",), episodes=3, seed=3, search_episodes=2)


def made(directory, recipe=FEW, processes=1, **changes):
    return make_exorl.make(dataclasses.replace(recipe, **changes), directory, processes)


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
    assert make_exorl.main(arguments) == 0
    directory = tmp_path / "cartpole" / "es_replay"
    printed = capsys.readouterr().out
    assert printed.startswith("swingup: returns 0% ") and f"to {directory}" in printed
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


RECIPE = "--worlds 2 --episodes 3 --seed 2 --action-repeat 10 --processes 1"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    output = tmp_path_factory.mktemp("data")
    assert make_worlds.main([*RECIPE.split(), "--output", str(output)]) == 0
    return Buffer(output, "cartpole", "worlds")


@pytest.mark.thorough
def test_worlds_pack_into_one_file_that_describes_them(worlds, tmp_path):
    file = pack(worlds, "swingup", tmp_path, Selection(action_repeat=10))
    assert file.directory == tmp_path / "cartpole" / "worlds" / "swingup"
    assert file.worlds.tolist() == [0] * 3 + [1] * 3
    assert file.lengths.tolist() == [100] * 6
    assert file.index["largest_difference_from_stored"] < 1e-6
    assert file.index["generator"] == meta_of(worlds)
    metas = [meta_of(world) for world in worlds.worlds()]
    described = [meta["hidden_physics"] for meta in metas]
    assert file.index["worlds_described"] == described
    returns = [row["return"] for meta in metas for row in meta["episodes"]]
    np.testing.assert_allclose(file.returns, returns, rtol=1e-6)


def test_histories_go_from_noise_to_one_that_knows_its_world(worlds):
    for world in worlds.worlds():
        rows = meta_of(world)["episodes"]
        assert [row["episode"] for row in rows] == list(range(3))
        assert rows[0]["return"] < 350 and rows[-1]["return"] > 600
        assert rows[0]["share"] < 0.6 and rows[-1]["share"] > 0.85
        assert rows[0]["noise"]["scale"] > 0.2 > rows[-1]["noise"]["scale"]
    one, other = (meta_of(world)["hidden_physics"] for world in worlds.worlds())
    assert one["strength"] != other["strength"]


WORLDS = [
    HiddenPhysics(),
    # Weak, heavy and long; strong, light and short.
    HiddenPhysics(-1, 0.7, 1.6, 1.6, 1.4),
    HiddenPhysics(1, 2.0, 0.5, 0.5, 0.6),
]


@pytest.mark.thorough
@pytest.mark.parametrize("world", WORLDS)
def test_a_controller_that_knows_its_world_swings_up(world):
    environment = Environment("cartpole", "swingup", world)
    done = roll_out(environment, controller(world, 5), None, 3, action_repeat=5)
    assert done.reward.sum() > 600


@pytest.mark.parametrize("world", WORLDS)
def test_moments_are_those_of_the_simulators_model(world):
    environment = Environment("cartpole", "swingup", world)
    model = environment._environment.physics.model
    body = _Body.of(world)
    height = model.body_ipos[2, 2]
    assert body.mass == pytest.approx(model.body_mass.sum())
    assert body.first == pytest.approx(model.body_mass[2] * height)
    about_hinge = model.body_inertia[2, 0] + model.body_mass[2] * height**2
    assert body.second == pytest.approx(about_hinge)


def arguments(root, **options):
    words = {"root": root / "data", "domain": "cartpole", "algorithm": "made_up"}
    words |= {"task": "swingup", "cache": root / "cache", "relabelling": "stored"}
    words |= options
    return [part for name, value in words.items() for part in (f"--{name}", str(value))]


def test_program_tells_what_it_packed_and_names_the_bad_file(tmp_path, capsys):
    buffer = made_up_buffer(tmp_path / "data", "cartpole", [4, 4, 4])
    assert pack_exorl.main([*arguments(tmp_path), "--max-transitions", "8"]) == 0
    out, err = capsys.readouterr()
    directory = tmp_path / "cache" / "cartpole" / "made_up" / "swingup"
    assert out.startswith("cartpole swingup, gathered by made_up, rewards stored\n")
    assert "2 episodes of 4 to 4 steps, 8 steps" in out
    assert out.endswith(f"written to {directory}\n") and err == ""
    assert len(TrajectoryFile.open(directory).returns) == 2
    path = buffer.scan()[0]
    path.write_bytes(b"some text")
    assert pack_exorl.main(arguments(tmp_path, cache=tmp_path / "other")) == 1
    expected = f"error: {path}: unreadable npz (BadZipFile: File is not a zip file)\n"
    assert capsys.readouterr().err == expected
