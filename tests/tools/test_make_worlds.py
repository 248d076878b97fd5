import json

import numpy as np
import pytest

from data.agents.environments import Environment
from data.agents.episodes import Buffer
from data.agents.exorl import Selection, pack
from data.agents.hidden_physics import HiddenPhysics
from tools.lib.exorl.controller import _Body, controller
from tools.lib.exorl.rollouts import roll_out
from tools.make_worlds import main

RECIPE = "--worlds 2 --episodes 3 --seed 2 --action-repeat 10 --processes 1"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    output = tmp_path_factory.mktemp("data")
    assert main([*RECIPE.split(), "--output", str(output)]) == 0
    return Buffer(output, "cartpole", "worlds")


def meta_of(buffer):
    return json.loads((buffer.directory / "meta.json").read_text())


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
