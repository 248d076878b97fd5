import dataclasses
import json

import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.episodes import Buffer
from data.agents.exorl import Selection, pack
from data.agents.hidden_physics import HiddenPhysics
from tests.processes import run_program
from tools.lib.exorl.worlds import WorldsRecipe, make

RECIPE = WorldsRecipe(worlds=3, episodes=5, seed=2, action_repeat=10)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return make(RECIPE, tmp_path_factory.mktemp("data"), 1)


def meta_of(buffer):
    return json.loads((buffer.directory / "meta.json").read_text())


@pytest.mark.thorough
def test_worlds_pack_into_one_file_that_describes_them(worlds, tmp_path):
    file = pack(worlds, "swingup", tmp_path, Selection(action_repeat=10))
    assert file.directory == tmp_path / "cartpole" / "worlds" / "swingup"
    assert file.worlds.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert file.lengths.tolist() == [100] * 15
    assert file.index["largest_difference_from_stored"] < 1e-6
    assert file.index["generator"] == meta_of(worlds)
    metas = [meta_of(world) for world in worlds.worlds()]
    described = [meta["hidden_physics"] for meta in metas]
    assert file.index["worlds_described"] == described
    returns = [row["return"] for meta in metas for row in meta["episodes"]]
    np.testing.assert_allclose(file.returns, returns, rtol=1e-6)


@pytest.mark.thorough
def test_described_worlds_do_what_was_recorded(worlds, tmp_path):
    file = pack(worlds, "swingup", tmp_path, Selection(action_repeat=10))
    episode = 9
    described = file.index["worlds_described"][file.worlds[episode]]
    environment = Environment("cartpole", "swingup", HiddenPhysics.of(described))
    [world] = [w for w in worlds.worlds() if w.directory.name == "world_001"]
    path = world.scan()[4]
    environment.set_physics(np.load(path)["physics"][0])
    steps = file.read(np.arange(file.offsets[episode], file.offsets[episode + 1]))
    for row, after in zip(steps[:10], steps[1:], strict=False):
        for _ in range(10):
            seen = environment.step(row[5:6]).observation
        np.testing.assert_allclose(seen, after[:5], atol=1e-5)


def test_histories_go_from_noise_to_one_that_knows_its_world(worlds):
    for world in worlds.worlds():
        rows = meta_of(world)["episodes"]
        assert [row["episode"] for row in rows] == list(range(5))
        assert rows[0]["return"] < 350 and rows[-1]["return"] > 600
        assert rows[0]["share"] < 0.6 and rows[-1]["share"] > 0.85
        assert rows[0]["noise"]["scale"] > 0.2 > rows[-1]["noise"]["scale"]
    drawn = [meta_of(world)["hidden_physics"] for world in worlds.worlds()]
    assert len({world["strength"] for world in drawn}) == 3
    assert {world["direction"] for world in drawn} == {-1, 1}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"worlds": 0}, "worlds=0 and .* at least 1"),
        ({"episodes": 0}, "episodes=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 at least 0"),
        ({"action_repeat": 1001}, "action_repeat=1001 .* the 1000 steps"),
    ],
)
def test_recipes_that_make_nothing_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(RECIPE, **changes)


@pytest.mark.thorough
def test_program_runs_from_the_root(tmp_path):
    small = "--worlds", "1", "--episodes", "2", "--processes", "1"
    code, told, errors = run_program(
        "-m", "tools.make_worlds", "--output", tmp_path, *small
    )
    assert (code, errors) == (0, "")
    assert told.startswith("all: returns 0% ")
    assert f"written to {Buffer(tmp_path, 'cartpole', 'worlds').directory}" in told
