"""Agents in a task and in worlds that were held out: what is written, refused."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import exorl_tiny, icrl
from data.agents.chains import split_episodes
from data.agents.dark_room import ROOMS
from data.agents.environments import Environment
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter, identify
from tasks.exorl import AgentRun
from tests.cases import pairs
from tests.small import gymnasium
from tests.small.agents import SMALL, drawn
from tests.support.pages import ROOT
from tools.lib.evaluation.exorl import main
from tools.lib.exorl.play import contexts
from tools.lib.exorl.scenes import Simulations, scene
from tools.lib.exorl.scores import interval, scores
from tools.make_dark_room import make
from training.saved.weights import SavedParameters, save_parameters

REPEAT = 250  # of 1000 steps
EPISODES, ROWS = 2, 20
# A cart-pole whose episodes have four steps.
TASK = SMALL | {"agent.observation_size": 0, "agent.action_size": 0}
TASK |= {"agent.episode_steps": 1000 // REPEAT, "data.context_tokens": 32}
TASK |= {"mesh.data": 4, "mesh.ring": 2, "simulated_devices": 0}
ROOM = {"model.hidden_size": 16, "model.feed_forward_size": 24, "model.num_layers": 2}
ROOM |= {"model.head_dim": 8, "implementation": "reference", "simulated_devices": 0}
ROOM |= {"agent.chain_length": EPISODES, "data.context_tokens": EPISODES * 20}
ROOM |= {"data.batch_rows": 8, "mesh.data": 2, "mesh.ring": 4}


def saved(directory, config, fields, file) -> list[str]:
    """Flags of an agent that was not trained, whose parameters are saved."""
    fields = fields | {"data.trajectories": f"{directory}/trajectories"}
    config.update_from_flattened_dict(fields)
    run = AgentRun.of(config, jax.devices())
    parameters = drawn(run.model, run.partition)
    save_parameters(directory / "run", parameters, run.fingerprint(file))
    fields = fields | {"workdir": f"{directory}/run"}
    return [f"--config.{name}={value}" for name, value in fields.items()]


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> tuple[Path, list[str]]:
    """Directory and flags of an agent in the cart-pole."""
    directory = tmp_path_factory.mktemp("task")
    rng = np.random.default_rng(0)
    about = {"domain": "cartpole", "task": "swingup", "action_repeat": REPEAT}
    with TrajectoryWriter(directory / "trajectories", about) as writer:
        for _ in range(12):
            actions = rng.uniform(-1, 1, (4, 1))
            writer.write(rng.normal(size=(4, 5)), actions, rng.uniform(size=4))
    file = TrajectoryFile.open(directory / "trajectories")
    flags = saved(directory, exorl_tiny.get_config(), TASK, file)
    size = ["--environments", "4", "--episodes", "2"]
    return directory, ["--config=configs/exorl_tiny.py", *flags, *size]


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> tuple[Path, list[str]]:
    """Directory and flags of an agent in a room."""
    directory = tmp_path_factory.mktemp("room")
    file = make("9x9", "exploration", EPISODES, 0, directory / "trajectories")
    flags = saved(directory, icrl.get_config("dark_room/9x9/dpt"), ROOM, file)
    size = ["--environments", str(ROWS), "--episodes", str(EPISODES)]
    return directory, ["--config=configs/icrl.py:dark_room/9x9/dpt", *flags, *size]


def evaluated(agent: tuple[Path, list[str]], name: str, *options: str) -> dict:
    output = agent[0] / name
    assert main([*agent[1], *options, "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.mark.thorough
def test_returns_and_scores_are_written_by_context(task):
    directory, _ = task
    results = evaluated(task, "results.json")
    assert (results["task"], results["step"]) == ("cartpole swingup", 0)
    assert results["digests"] == {
        "parameters": SavedParameters(directory / "run").digest,
        "trajectories": identify(directory / "trajectories")[0],
    }
    assert list(results["contexts"]) == ["own", "empty"]
    file = TrajectoryFile.open(directory / "trajectories")
    training = split_episodes(file.worlds, SMALL["data.held_out_share"])["train"]
    assert results["target"] == file.returns[training].max()
    for outcome in results["contexts"].values():
        returns = np.array(outcome["returns"])
        assert returns.shape == (4, 2)
        best, scored = returns.max(axis=1).mean(), outcome["scores"]
        assert scored["best_of_n"]["mean"] == pytest.approx(best, abs=1e-4)
        assert np.array(outcome["recorded_returns"]).shape == (4, 0)
    own, empty = (np.array(results["contexts"][n]["returns"]) for n in ("own", "empty"))
    np.testing.assert_array_equal(own[:, 0], empty[:, 0])
    assert (own[:, 1] != empty[:, 1]).any()


@pytest.fixture(scope="module")
def in_room(room):
    return evaluated(room, "results.json", "--random", "3", "1")


@pytest.mark.thorough
def test_contexts_begin_alike_and_hold_what_they_say(in_room):
    found = in_room["contexts"]
    names = ["own", "empty", "other", "random_3", "random_1"]
    returns = {name: np.array(found[name]["returns"]) for name in names}
    before = [np.array(found[n]["recorded_returns"]).shape[1] for n in names]
    assert before == [0, 0, EPISODES - 1, 1, 1]  # of drawn ones, the mean
    assert returns["own"].shape == returns["empty"].shape == (ROWS, EPISODES)
    assert returns["other"].shape == returns["random_3"].shape == (ROWS, 1)
    # Drawn episodes are as chance has it: 0.25 on average of all goals.
    assert 0 < np.mean(found["random_3"]["recorded_returns"]) < 2
    # A device has a half of the rows, and a quarter of the longest context.
    rows, slots = ROWS // 2, (3 + 1) * 20 // 4
    numbers = 2 * 2 * rows * slots * 2 * 8 + rows * slots + 4  # keys, values, index
    held = {outcome["cache_bytes_a_device"] for outcome in found.values()}
    assert held == {4 * numbers}


@pytest.mark.thorough
def test_worlds_are_those_held_out_and_beside_their_references(room, in_room):
    file, places = TrajectoryFile.open(room[0] / "trajectories"), ROOMS["9x9"]
    worlds = np.unique(file.worlds[split_episodes(file.worlds, 0.2)["test"]])
    acted = np.array(in_room["worlds"])
    assert len(worlds) == 8 < ROWS and sorted(acted[:8]) == worlds.tolist()
    np.testing.assert_array_equal(acted, np.resize(acted[:8], ROWS))
    # Numbers next to each other are of goals next to each other.
    assert np.abs(np.diff(acted[:8])).mean() > 15 > np.diff(worlds).mean()
    known = in_room["references"]
    # Of each world once, whatever rows it has.
    assert known["oracle"] == places.best_return(places.goals[worlds]).mean()
    assert known["random"] == pytest.approx(places.random_return()[worlds].mean())
    assert len(known["explorer"]) == EPISODES


@pytest.mark.parametrize("name", ROOMS)
def test_the_explorer_finds_every_goal_once_and_returns_to_it(name):
    room = ROOMS[name]
    returns = room.explorer_returns(room.goals, 10)
    best = room.best_return(room.goals)
    assert (np.diff(returns) >= 0).all() and (returns[:, -1] == best).all()
    # A step finds one cell at most, so no two goals are found in the same step.
    found = np.array([row[row > 0][0] - 1000 * (row == 0).sum() for row in returns])
    assert len(set(found)) == room.size**2
    start = room.start[0] * room.size + room.start[1]
    assert returns[start].tolist() == [room.steps] * 10


@pytest.mark.thorough
def test_a_window_acts_on_in_worlds_that_were_trained_on(room, in_room, capsys, bars):
    longer = "--episodes", "3", "--contexts", "own", "--window", "2", "--split", "train"
    found = evaluated(room, "long.json", *longer)
    assert bars[-1].n == bars[-1].total == 3
    assert np.array(found["contexts"]["own"]["returns"]).shape == (ROWS, 3)
    assert (found["split"], in_room["split"]) == ("train", "test")
    assert not set(found["worlds"]) & set(in_room["worlds"])
    assert found["references"]["oracle"] != in_room["references"]["oracle"]
    # An agent that reads positions may act on too: its many episodes are not refused.
    positions = "--config.agent.reads_positions=True"
    output = str(room[0] / "again.json")
    assert main([*room[1], *longer, positions, "--output", output]) == 1
    assert "belong to another model" in capsys.readouterr().err


def test_the_other_world_is_never_the_rows_own(room):
    """Also where there are more rows than worlds."""
    file, worlds = TrajectoryFile.open(room[0] / "trajectories"), np.array([3, 8, 70])
    seeds = np.zeros((5, 2), int)
    (before, _), (after, _) = contexts(file, worlds, seeds)["other"].scenes
    own = ROOMS["9x9"].goals[[3, 8, 70, 3, 8]]
    np.testing.assert_array_equal(after.goals, own)
    assert (before.goals != own).any(axis=1).all()
    assert "other" not in contexts(file, worlds[:1], seeds)
    # Nor is it where no episode is before the one that counts.
    assert "other" not in contexts(file, worlds, seeds[:, :1])
    assert list(contexts(file, worlds, seeds, [1], ["empty"])) == ["empty", "random_1"]


BAD = [(kind, *case) for kind in ("task", "room") for case in pairs("agents.txt", kind)]


@pytest.mark.parametrize(("kind", "options", "said"), BAD)
def test_bad_input_is_refused_with_one_line(
    request, tmp_path, capsys, kind, options, said
):
    flags, output = request.getfixturevalue(kind)[1], tmp_path / "x.json"
    assert main([*flags, *options.split(), "--output", str(output)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error
    assert not output.exists()


def recorded(directory: Path, **fields: object) -> TrajectoryFile:
    """Trajectories of the cart-pole's shapes, of an environment of gymnasium."""
    environment = json.dumps(gymnasium.SPEC | fields)
    about = {"domain": "minari", "task": "any", "environment": environment}
    with TrajectoryWriter(directory, about) as writer:
        for _ in range(12):
            writer.write(np.zeros((4, 5)), np.zeros((4, 1)), np.zeros(4))
    return TrajectoryFile.open(directory)


@pytest.mark.parametrize(("fields", "said"), pairs("agents.txt", "spec"))
def test_a_recorded_environment_is_refused_before_its_code_runs(
    task, tmp_path, monkeypatch, capsys, fields, said
):
    for name, module in gymnasium.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    ran = tmp_path / "ran"
    fields = json.loads(fields.replace("RAN", str(ran)))
    file = recorded(tmp_path / "trajectories", **fields)
    flag = f"--config.data.trajectories={file.directory}"
    assert main([*task[1], flag, "--output", str(tmp_path / "x.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
    assert not ran.exists()


def test_code_that_is_named_as_trusted_runs(task, tmp_path, monkeypatch, capsys):
    for name, module in gymnasium.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    known = {"name": "x", "entry_point": "tests.small.gymnasium:Wrapper", "kwargs": {}}
    touch = "tests.small.gymnasium:touch"
    own = recorded(tmp_path / "own", additional_wrappers=[known])
    assert len(scene(own, np.zeros(3, int)).environments) == 3
    path = {"path": str(tmp_path / "ran")}
    fields = {"entry_point": touch, "kwargs": path, "max_episode_steps": 5}
    file = recorded(tmp_path / "other", **fields)
    with pytest.raises(ValueError, match="gymnasium's own"):
        scene(file, np.zeros(1, int), ["tests.small.gymnasium:Ramp", "touch"])
    flags = [*task[1], f"--config.data.trajectories={file.directory}"]
    flags += ["--trust-entry-point", "other:Code", "--trust-entry-point", touch]
    assert main([*flags, "--output", str(tmp_path / "x.json")]) == 1
    assert "episode_steps=4 must be at least 5" in capsys.readouterr().err
    assert (tmp_path / "ran").exists()


def test_intervals_hold_the_mean_and_are_as_wide_as_theory_has_it():
    values = np.random.default_rng(3).normal(10, 2, 400)
    found = interval(values)
    assert found["mean"] == pytest.approx(values.mean())
    theory = 1.96 * values.std() / 20
    assert found["mean"] - found["low"] == pytest.approx(theory, rel=0.1)
    assert found["high"] - found["mean"] == pytest.approx(theory, rel=0.1)
    assert interval(np.full(5, 3.0)) == {"mean": 3.0, "low": 3.0, "high": 3.0}


@pytest.mark.parametrize("worlds", [[0, 1], [7, 7]], ids=["two", "one"])
def test_scores_of_returns_made_by_hand(worlds):
    """Also of two rows in one world, whose best ones are of different episodes."""
    found = scores(np.array([[1.0, 5.0, 3.0], [2.0, 0.0, 4.0]]), np.array(worlds))
    means = {name: score["mean"] for name, score in found.items()}
    assert means == {"best_of_n": 4.5, "last": 3.5, "mean": 2.5, "first": 1.5}


def test_held_actions_sum_rewards():
    task, action = ("cartpole", "swingup"), np.full(1, 0.3, np.float32)
    rows = Simulations([Environment(*task)], action_repeat=300, limit=4)
    rows.reset(seed=[7])
    outcomes = [rows.step(action[None]) for _ in range(4)]
    ends = [outcome[2:4] for outcome in outcomes]
    assert ends == [(False, False)] * 3 + [(False, True)]
    environment = Environment(*task)
    environment.reset(7)
    total = sum(environment.step(action).reward for _ in range(1000))
    assert sum(outcome[1][0] for outcome in outcomes) == pytest.approx(total)
    # An episode may be shorter than dm_control's.
    rows.limit = 2
    rows.reset(seed=[7])
    assert [rows.step(action[None])[3].tolist() for _ in "12"] == [[False], [True]]


def test_rows_have_the_rewards_of_their_tasks(tmp_path):
    goals = [[0.0, 0.0], [0.2, 0.2], [-0.2, 0.1]]
    about = {"domain": "point_mass", "task": "goals", "action_repeat": 250}
    about["worlds_described"] = [{"target": goal} for goal in goals]
    rewards = np.array([[1.0, 2], [3, 4], [5, 6]])
    with TrajectoryWriter(tmp_path / "goals", about) as writer:
        for scale in 1, 2:
            writer.write(np.zeros((2, 4)), np.zeros((2, 2)), scale * rewards)
    file = TrajectoryFile.open(tmp_path / "goals")
    worlds, seeds = np.array([2, 0, 2]), np.array([[7], [7], [8]])
    rows = scene(file, worlds)
    rows.reset(seed=seeds[:, 0].tolist())
    rewards = rows.step(np.full((3, 2), 0.5, np.float32))[1]
    for row, (world, (seed,)) in enumerate(zip(worlds, seeds, strict=True)):
        environment = Environment("point_mass", "goals", np.array([goals[world]]))
        environment.reset(int(seed))
        assert rewards[row] == environment.step(np.full(2, 0.5), 250).reward
    assert rewards[0] != rewards[1]


# The one command of agents in context: what it runs, what it keeps and refuses.


@pytest.fixture
def run(tmp_path: Path):
    """Runs the script in a folder: its exit status, what it said, and what it ran."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/in_context.sh", tmp_path / "tools")
    shutil.copy(ROOT / "tests/fixtures/python_stub.sh", tmp_path / "stub")
    (tmp_path / "stub").chmod(0o755)

    def start(words: str) -> tuple[int, str, list[str]]:
        (tmp_path / "ran").write_text("")
        command = ["bash", "tools/in_context.sh", *words.split()]
        given = os.environ | {"PYTHON": "./stub", "OUT": "out"}
        done = subprocess.run(
            command, cwd=tmp_path, env=given, capture_output=True, text=True
        )
        ran = (tmp_path / "ran").read_text().splitlines()
        return done.returncode, done.stdout + done.stderr, ran

    return start


@pytest.mark.quick
def test_it_makes_data_trains_acts_and_draws_each_agent(run, tmp_path):
    bad = {"9x9 bc": "WHERE AGENTS SEEDS", "8x8 bc 0": "8x8 is neither 10x10 nor 9x9"}
    for words, said in bad.items():
        status, error, commands = run(words)
        assert status == 1 and said in error and not commands
    assert not (tmp_path / "out").exists()
    status, _, commands = run("9x9 dpt,ad 0,1")
    assert status == 0
    acts, config = "tools.evaluate exorl", "train.py --config=configs/icrl.py"
    made = "tools.make_dark_room --room"
    dpt, ad = f"{config}:dark_room/9x9/dpt", f"{config}:dark_room/9x9/ad"
    seed = [dpt, acts, acts, ad, acts]
    # Data are made once, the explorer's and the imitators'.
    expected = [made, *seed[:3], made, *seed[3:], *seed, "tools.figures returns"]
    begin = [" ".join(line.removeprefix("-m ").split()[:2]) for line in commands]
    assert begin == expected
    acted = [line for line in commands if acts in line]
    assert ["--window 20" in x for x in acted] == ["9x9/ad" in x for x in acted]
    drawn = [
        f"{tmp_path}/out/{n}.json" for n in ("dpt_0", "dpt_0_read", "ad_0", "dpt_1")
    ]
    assert commands[-1].startswith(f"-m tools.figures returns {' '.join(drawn)}")
    # What is there is kept, and said so.
    status, said, commands = run("9x9 dpt,ad 0,1")
    assert status == 0 and len(commands) == 1 and "tools.figures" in commands[0]
    assert f"{tmp_path}/out/dpt_1.json is there, and is kept" in said
