import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from data.environments import Environment
from data.episodes import Buffer
from data.exorl import Selection, pack
from data.hidden_physics import HiddenPhysics
from tests.processes import run_program
from tools.lib.exorl.controller import controller
from tools.lib.exorl.policies import Noise
from tools.lib.exorl.worlds import Grade, WorldsRecipe, make

RECIPE = WorldsRecipe(worlds=3, episodes=5, seed=2, action_repeat=10)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return make(RECIPE, tmp_path_factory.mktemp("data"), 1)


def meta_of(buffer):
    return json.loads((buffer.directory / "meta.json").read_text())


def contents(buffer):
    files = [path for path in buffer.directory.rglob("*") if path.is_file()]
    return {path.relative_to(buffer.directory): path.read_bytes() for path in files}


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


def test_what_should_have_been_done_is_packed_where_asked_for(worlds, tmp_path):
    held = Selection("stored", action_repeat=10)
    file = pack(worlds, "swingup", tmp_path, held, controller)
    assert file.has_targets
    plain = pack(worlds, "swingup", tmp_path / "plain", held)
    assert not plain.has_targets
    steps = file.steps[:]
    np.testing.assert_array_equal(np.delete(steps, 6, axis=1), plain.steps[:])
    described = HiddenPhysics.of(file.index["worlds_described"][1])
    act, row = controller(described, 10), steps[file.offsets[7] + 30]
    assert row[6] == pytest.approx(np.clip(act(row[:5]), -1, 1)[0])
    # The last of a history does nearly that.
    last = steps[file.offsets[4] : file.offsets[5]]
    assert np.corrcoef(last[:, 5], last[:, 6])[0, 1] > 0.8


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


def test_grades_rise_with_their_place():
    rng = np.random.default_rng(0)
    drawn = {p: [Grade.draw(rng, p) for _ in range(200)] for p in (0.0, 0.5, 1.0)}
    shares = {p: np.array([grade.share for grade in some]) for p, some in drawn.items()}
    assert np.median(shares[0.0]) < 0.2 and np.median(shares[1.0]) > 0.99
    assert shares[0.5].mean() == pytest.approx(0.7, abs=0.02)
    assert 0.05 < shares[0.5].std() < 0.1
    doubts = [np.mean([grade.doubt for grade in some]) for some in drawn.values()]
    assert doubts[0] > 0.3 > 0.2 > doubts[1] > 0.1 > 0.03 > doubts[2]
    for some in drawn.values():
        assert all(g.noise.scale <= 1.5 * (1 - g.share) for g in some)


def test_policies_are_mixed_as_the_grade_says():
    own, other = (lambda _: np.array([3.0])), (lambda _: np.array([-0.4]))
    grade = Grade(share=0.5, doubt=0.25, noise=Noise(0.0, 0.0))
    expected = 0.5 * (0.75 * 1 + 0.25 * -0.4)
    assert grade.policy(own, other)(np.zeros(5)) == pytest.approx(expected)


@pytest.mark.thorough
def test_same_seed_makes_the_same_bytes_in_any_number_of_processes(worlds, tmp_path):
    few = dataclasses.replace(RECIPE, worlds=2)
    one, two = contents(make(few, tmp_path, 2)), contents(worlds)
    episodes = [path for path in one if path.suffix == ".npz"]
    assert len(episodes) == 10
    assert all(one[path] == two[path] for path in episodes)
    other = make(dataclasses.replace(RECIPE, worlds=1, seed=3), tmp_path / "other", 1)
    path = Path("world_000/buffer/episode_000000_1000.npz")
    assert contents(other)[path] != one[path]


def test_existing_worlds_are_kept(worlds):
    before = contents(worlds)
    with pytest.raises(FileExistsError, match="worlds already exists and is left"):
        make(RECIPE, worlds.root, 1)
    assert contents(worlds) == before


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
