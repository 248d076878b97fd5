"""Recorded episodes: of noise in ExoRL's format, of Dark Room, and Minari's, packed."""

import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from data.agents.dark_room import MOVES, ROOMS, record
from data.agents.episodes import BadEpisode, read_episode
from data.agents.exorl import Selection, pack
from tools import make_dark_room, make_exorl, pack_exorl, pack_minari
from tools.lib.exorl.scenes import flat, of_agent, to_agent
from tools.make_exorl import draw_noise


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return make_exorl.make(tmp_path_factory.mktemp("data"), "cartpole", 3, 3, 8)


ROOM = "--room 9x9 --recorded exploration --episodes 3"
POLE = "--domain cartpole --episodes 1 --action-repeat 8"


@pytest.mark.parametrize(
    ("program", "words"), [(make_exorl, POLE), (make_dark_room, ROOM)]
)
def test_the_same_seed_makes_the_same_bytes_which_are_kept(
    program, words, tmp_path, capsys
):
    def files(name, seed):
        output = tmp_path / name
        options = ["--output", str(output), "--seed", seed]
        assert program.main([*words.split(), *options]) == 0
        paths = [path for path in output.rglob("*") if path.is_file()]
        return {path.relative_to(output): path.read_bytes() for path in paths}

    one, other = files("one", "1"), files("other", "0")
    assert one == files("two", "1") and len(one) == 2
    assert one.keys() == other.keys()
    assert not {*one.values()} & {*other.values()}
    assert program.main([*words.split(), "--output", f"{tmp_path}/one"]) != 0
    assert "already exists and is left" in capsys.readouterr().err


def test_noise_has_its_strength_and_its_colour(rng):
    for exponent in make_exorl.EXPONENTS:
        noise = draw_noise(rng, exponent, 0.3, size=50)
        np.testing.assert_allclose(noise.std(axis=0), 0.3)
        np.testing.assert_allclose(noise.mean(axis=0), 0, atol=1e-12)
        power = np.square(np.abs(np.fft.rfft(noise, axis=0))).mean(axis=1)
        # From a low to a high band, 16 times as high, power falls by 16^exponent.
        low, high = power[10:20].mean(), power[160:320].mean()
        assert np.log(low / high) / np.log(16) == pytest.approx(exponent, abs=0.1)


def test_a_point_mass_walks_to_places_everywhere(tmp_path):
    buffer = make_exorl.make(tmp_path, "point_mass", 12, 3, action_repeat=20)
    seen = [read_episode(path, "point_mass").observation for path in buffer.scan()]
    last = np.array([observation[-1, :2] for observation in seen])
    # Far from the walls, where noise alone would end, and in all directions.
    assert np.abs(last).max() < 0.27 and last.min(axis=0).max() < -0.05
    assert last.max(axis=0).min() > 0.05
    still = [np.ptp(o[-100:, :2], axis=0).max() < 0.1 for o in seen]
    assert sum(still) > 4


def test_actions_are_held_and_packed_as_one(few, tmp_path):
    (one,) = pack(few, ["swingup"], tmp_path / "one")
    (eight,) = pack(few, ["swingup"], tmp_path / "eight", Selection(action_repeat=8))
    assert (one.action_repeat, eight.action_repeat) == (1, 8)
    assert one.index["largest_difference_from_stored"] < 1e-6
    of_episode = [read_episode(path, "cartpole").reward.sum() for path in few.scan()]
    np.testing.assert_allclose(one.returns, of_episode, rtol=1e-6)
    meta = json.loads((few.directory / "meta.json").read_text())
    assert meta["stored_task"] == "swingup"  # the domain's first task
    assert eight.lengths.tolist() == [125] * 3
    np.testing.assert_allclose(eight.returns, one.returns, rtol=1e-6)
    np.testing.assert_array_equal(eight.steps[:][:, :-1], one.steps[:][::8, :-1])
    actions = one.steps[:][:, 5].reshape(-1, 8)
    assert (actions == actions[:, :1]).all() and (np.diff(actions[:, 0]) != 0).any()
    pieces = Selection(action_repeat=8, piece=50)
    (cut,) = pack(few, ["swingup"], tmp_path / "cut", pieces)
    assert cut.lengths.tolist() == [50] * 6  # of 125 steps 25 are left over
    whole = eight.steps[:].reshape(3, 125, -1)[:, :100]
    np.testing.assert_array_equal(cut.steps[:], whole.reshape(300, -1))
    with pytest.raises(BadEpisode, match="action 9 differs .* action_repeat=3"):
        pack(few, ["swingup"], tmp_path / "three", Selection(action_repeat=3))


def test_the_program_tells_what_it_packed(few, tmp_path, capsys):
    words = f"--root {few.root} --domain cartpole --algorithm scripted --task swingup"
    words = f"{words} --max-transitions 2000 --cache {tmp_path}"
    assert pack_exorl.main(words.split()) == 0
    said = capsys.readouterr().out
    assert "2 episodes of 1000 to 1000 steps, 2,000 steps; returns" in said
    assert f"written to {tmp_path}/cartpole/scripted/swingup" in said


# Dark Room: its end points, which are exact, and what is recorded there.


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


@pytest.mark.thorough
def test_files_of_rooms_have_worlds_targets_and_a_learner_that_learns(tmp_path):
    file = make_dark_room.make("9x9", "learning", 300, 0, tmp_path / "learning")
    assert len(file.returns) == 81 * 300 and file.has_targets
    np.testing.assert_array_equal(file.worlds, np.tile(np.arange(81), 300))
    assert file.index["worlds_described"][10] == {"goal": [1, 1]}
    returns = file.returns.reshape(300, 81)
    assert returns[:5].mean() < 1.5 and 4 < returns[50:100].mean() < 12
    assert returns[-10:].mean() > 0.9 * 1340 / 81 and returns[-10:].any(axis=0).all()
    steps = file.steps[:].reshape(-1, 20, 18 + 5 + 5 + 1)
    row, column, action, best, _ = np.split(steps, [9, 18, 23, 28], axis=-1)
    assert all((x.sum(axis=-1) == 1).all() for x in (row, column, action, best))
    assert (row[:, 0, 4] == 1).all() and (column[:, 0, 4] == 1).all()
    goes_down = action[:, :-1, 2] == 1  # in the first axis
    moved = row[:, 1:].argmax(axis=-1) - row[:, :-1].argmax(axis=-1)
    assert (moved[goes_down] >= 0).all() and (moved[goes_down] == 1).any()


# Spaces of gymnasium as agents see them, and Minari's episodes.


def box(low, high, dtype=np.float32):
    low, high = np.array(low, dtype), np.array(high, dtype)
    return SimpleNamespace(low=low, high=high, shape=low.shape, dtype=low.dtype)


BOX = box([[-2.0, 0.0]], [[2.0, 4.0]])
DISCRETE = SimpleNamespace(n=3, start=1)


def test_actions_of_spaces_go_both_ways():
    actions = np.array([[[2.0, 1.0]], [[-2.0, 4.0]]], np.float32)
    agents = to_agent(actions, BOX)
    assert agents.tolist() == [[1, -0.5], [-1, 1]]
    np.testing.assert_array_equal(of_agent(agents, BOX), actions, strict=True)
    chosen = to_agent(np.array([1, 3]), DISCRETE)
    assert chosen.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert of_agent(chosen, DISCRETE).tolist() == [1, 3]
    # A number with one value has that value, whatever an agent says.
    constant = box([-1.0, 3.0], [0.7, 3.0])
    one = to_agent(np.array([[0.7, 3.0]]), constant)  # of float64
    np.testing.assert_allclose(one, [[1.0, -1.0]], rtol=1e-6)
    np.testing.assert_allclose(of_agent(-one, constant), [[-1.0, 3.0]], rtol=1e-6)
    # Whole numbers come back, also where their range is too wide for their type.
    whole = box([-128], [127], np.int8)
    every = np.arange(-128, 128, dtype=np.int8)[:, None]
    agents = to_agent(every, whole)
    assert (agents[0], agents[-1]) == (-1, 1)
    np.testing.assert_array_equal(of_agent(agents, whole), every, strict=True)


@pytest.mark.parametrize(
    ("actions", "space", "said"),
    [
        ([[[1.0, 1.0]], [[2.5, 1.0]]], BOX, r"got \[\[2.5, 1.0\]\] in step 1"),
        ([[[1.0, -0.5]]], BOX, r"got \[\[1.0, -0.5\]\] in step 0"),
        ([[[1.0, np.nan]]], BOX, r"got \[\[1.0, nan\]\] in step 0"),
        ([[0.5]], box([-np.inf], [np.inf]), "of a bounded Box or of a Dis"),
        ([[0.5]], box([-3e38], [3e38]), "of a bounded Box or of a Dis"),
        ([1, 4], DISCRETE, "got 4 in step 1"),
        ([1, 0], DISCRETE, "got 0 in step 1"),
        ([[1, 0]], SimpleNamespace(n=2), "or of a Discrete, got .*n=2"),
        (
            ([[1.0]], [1]),
            SimpleNamespace(spaces=()),
            "or of a Discrete, got .*spaces",
        ),
    ],
)
def test_actions_that_their_space_does_not_have_are_named(
    tmp_path, actions, space, said
):
    episode = SimpleNamespace(
        observations=np.zeros((len(actions) + 1, 1)),
        actions=actions,
        rewards=np.zeros(len(actions)),
        terminations=[False],
    )
    dataset = SimpleNamespace(
        id="x", env_spec=None, action_space=space, iterate_episodes=lambda: [episode]
    )
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=said) as error:
        pack_minari.pack(dataset, tmp_path / "packed")
    assert str(error.value).startswith("episode 0: ")
    if space is BOX and "in step" in said and "nan" not in said:
        file = pack_minari.pack(dataset, tmp_path / "clipped", clip=True)
        assert np.abs(file.read(np.arange(len(actions)))[:, 1:3]).max() == 1
    episode.actions, dataset.action_space = [0.0], box(-1, 1)
    episode.observations = ["left", "right"]
    with pytest.raises(ValueError, match="episode 0: .*'left'"):
        pack_minari.pack(dataset, tmp_path / "texts")


def test_a_dataset_without_spaces_is_refused(tmp_path, monkeypatch, capsys):
    """Minari would make its environment, and so run what it names, to know them."""
    about = {"observation_space": "{}", "env_spec": "{}"}
    storage = SimpleNamespace(read_raw_metadata=lambda folder: about)
    folders = SimpleNamespace(get_dataset_path=lambda name: tmp_path / name)
    modules = {"minari.dataset.minari_storage": SimpleNamespace(MinariStorage=storage)}
    modules["minari.storage.datasets_root_dir"] = folders
    modules |= {name: ModuleType(name) for name in ("minari.dataset", "minari.storage")}
    loaded = []
    modules["minari"] = SimpleNamespace(load_dataset=loaded.append)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    words = ["--dataset", "some/data-v0", "--cache", str(tmp_path)]
    assert pack_minari.main(words) == 1
    error = capsys.readouterr().err
    assert "some/data-v0 must have an observation_space and an action_space" in error
    assert not loaded
    about["action_space"] = "{}"
    pack_minari.check_spaces("some/data-v0")


def test_a_dataset_is_packed_with_flat_observations(tmp_path):
    """Episodes as Minari gives them: one more observation, of the end."""
    rng, episodes = np.random.default_rng(5), []
    for length in 4, 2:
        seen = {
            "z": (rng.normal(size=(length + 1, 2)), rng.normal(size=(length + 1, 2))),
            "a": rng.normal(size=length + 1),
        }
        rewards = rng.uniform(size=length)
        actions = rng.integers(1, 4, size=length)
        one = SimpleNamespace(observations=seen, actions=actions, rewards=rewards)
        one.terminations = np.arange(length) == 3
        episodes.append(one)
    dataset = SimpleNamespace(
        id="some/data-v0",
        env_spec=SimpleNamespace(to_json=lambda: "a description"),
        action_space=DISCRETE,
        iterate_episodes=lambda: iter(episodes),
    )
    file = pack_minari.pack(dataset, tmp_path / "packed")
    assert file.lengths.tolist() == [4, 2] and file.index["task"] == "some/data-v0"
    assert (file.observation_size, file.action_size) == (5, 3)
    assert file.index["environment"] == "a description"
    assert file.terminated.tolist() == [True, False]
    np.testing.assert_allclose(
        file.returns, [one.rewards.sum() for one in episodes], rtol=1e-6
    )
    last = file.read(np.arange(4, 6))
    seen = episodes[1].observations
    np.testing.assert_allclose(last[:, 0], seen["a"][:2], rtol=1e-6)
    both = np.concatenate(seen["z"], axis=1)
    np.testing.assert_allclose(last[:, 1:5], both[:2], rtol=1e-6)
    assert (last[:, 5:8].argmax(axis=1) + 1 == episodes[1].actions).all()
    assert flat(seen).shape == (3, 5)
