"""Agents in worlds that were held out: what they read, what is written, refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import icrl_dark_room
from data.agents.chains import hold_out
from data.agents.dark_room import ROOMS
from data.agents.hidden_physics import HiddenPhysics
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter
from tasks import base, exorl
from tests.small_agent import drawn
from tools.lib.evaluation.exorl import main
from tools.lib.exorl.contexts import Context, asked, world_contexts
from tools.lib.exorl.references import references
from tools.make_dark_room import make
from training.weights import save_parameters

EPISODES, ROWS = 2, 20
SMALL = {"model.hidden_size": 16, "model.feed_forward_size": 24, "model.num_layers": 2}
SMALL |= {"model.head_dim": 8, "implementation": "reference", "simulated_devices": 0}
SMALL |= {"agent.chain_length": EPISODES, "data.context_tokens": EPISODES * 20}
SMALL |= {"data.batch_rows": 8, "mesh.data": 2, "mesh.ring": 4}
NAME = "9x9/dpt"


def flags(directory: Path, *options: str) -> list[str]:
    fields = SMALL | {"workdir": f"{directory}/run"}
    fields |= {"data.trajectories": f"{directory}/trajectories"}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    size = ["--environments", str(ROWS), "--episodes", str(EPISODES)]
    config = f"--config=configs/icrl_dark_room.py:{NAME}"
    return [config, *arguments, *size, *options]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A room's trajectories, and parameters of an agent that was not trained."""
    directory = tmp_path_factory.mktemp("agent")
    file = make("9x9", "exploration", EPISODES, 0, directory / "trajectories")
    config = icrl_dark_room.get_config(NAME)
    config.update_from_flattened_dict(SMALL)
    partition = base.partition(config, jax.devices())
    model = exorl.model(config, partition)
    fingerprint = exorl.fingerprint(model, file)
    save_parameters(directory / "run", drawn(model, partition), fingerprint)
    return directory


@pytest.fixture(scope="module")
def results(directory: Path) -> dict:
    output = directory / "results.json"
    options = "--random", "3", "1", "--output", str(output)
    assert main(flags(directory, *options)) == 0
    return json.loads(output.read_text())


@pytest.mark.thorough
def test_contexts_begin_alike_and_hold_what_they_say(results):
    found = results["contexts"]
    names = ["own", "empty", "none", "other", "random_3", "random_1"]
    assert list(found) == names
    returns = {name: np.array(found[name]["returns"]) for name in names}
    before = [np.array(found[n]["recorded_returns"]).shape[1] for n in names]
    assert before == [0, 0, 0, EPISODES - 1, 1, 1]  # of drawn ones, the mean
    assert returns["own"].shape == returns["none"].shape == (ROWS, EPISODES)
    assert returns["other"].shape == returns["random_3"].shape == (ROWS, 1)
    assert all((0 <= r).all() and (r <= 20).all() for r in returns.values())
    above = results["own_last_over"]
    assert list(above) == ["first", *names[1:]]
    of_row = returns["own"][:, -1] - returns["own"][:, 0]
    worlds = np.array(results["worlds"])
    of_world = [of_row[worlds == world].mean() for world in set(results["worlds"])]
    gained = above["first"]["mean"]
    assert above["first"]["low"] <= gained == pytest.approx(np.mean(of_world))
    # Drawn episodes are as chance has it: 0.25 on average of all goals.
    drawn_ones = np.array(found["random_3"]["recorded_returns"])
    assert drawn_ones.mean() < 2
    # A device has a half of the rows, and a quarter of the longest context.
    rows, slots = ROWS // 2, (3 + 1) * 20 // 4
    numbers = 2 * 2 * rows * slots * 2 * 8 + rows * slots + 4  # keys, values, index
    held = {outcome["cache_bytes_a_device"] for outcome in found.values()}
    assert held == {4 * numbers}


@pytest.mark.thorough
def test_worlds_are_those_held_out_and_beside_their_references(directory, results):
    file, room = TrajectoryFile.open(directory / "trajectories"), ROOMS["9x9"]
    _, held_out = hold_out(file.worlds, 0.2)
    worlds = np.unique(file.worlds[held_out])
    acted = np.array(results["worlds"])
    assert len(worlds) == 16 < ROWS and sorted(acted[:16]) == worlds.tolist()
    assert acted[16:].tolist() == acted[: ROWS - 16].tolist()
    # Numbers next to each other are of goals next to each other.
    assert np.abs(np.diff(acted[:16])).mean() > 15 > np.diff(worlds).mean()
    known = results["references"]
    # Of each world once, whatever rows it has.
    assert known["oracle"] == room.best_return(room.goals[worlds]).mean()
    assert known["random"] == pytest.approx(room.random_return()[worlds].mean())
    assert len(known["tabular"]) == EPISODES
    assert results["versions"] == {"jax": jax.__version__}


@pytest.mark.thorough
def test_a_window_acts_on_in_worlds_that_were_trained_on(
    directory, tmp_path, results, capsys
):
    output = tmp_path / "long.json"
    longer = "--episodes", "3", "--contexts", "own", "--trained", "--window", "2"
    assert main(flags(directory, *longer, "--output", str(output))) == 0
    found = json.loads(output.read_text())
    assert found["window"] == 2 and list(found["contexts"]) == ["own"]
    assert np.array(found["contexts"]["own"]["returns"]).shape == (ROWS, 3)
    assert found["trained_on"] and not results["trained_on"]
    assert not set(found["worlds"]) & set(results["worlds"])
    assert found["references"]["oracle"] != results["references"]["oracle"]
    # Who reads positions may act on too: it is not refused for its many episodes.
    positions = "--config.agent.reads_positions=True"
    again = str(tmp_path / "again.json")
    assert main(flags(directory, *longer, positions, "--output", again)) == 1
    assert "belong to another model" in capsys.readouterr().err


def test_contexts_that_are_asked_for_are_played_with_drawn_ones():
    names = ["own", "empty", "none", "random_1"]
    found = {name: Context([], "", drawn=name == "random_1") for name in names}
    assert asked(found, None) == found
    assert list(asked(found, ["empty"])) == ["empty", "random_1"]
    assert list(asked(found, [])) == ["random_1"]


def test_the_other_world_is_never_the_rows_own(directory):
    """Also where there are more rows than worlds."""
    file, worlds = TrajectoryFile.open(directory / "trajectories"), np.array([3, 8, 70])
    seeds = np.zeros((5, 2), int)
    (before, _), (after, _) = world_contexts(file, worlds, seeds, [])["other"].scenes
    own = ROOMS["9x9"].goals[[3, 8, 70, 3, 8]]
    np.testing.assert_array_equal(after.goals, own)
    assert (before.goals != own).any(axis=1).all()
    assert "other" not in world_contexts(file, worlds[:1], seeds, [])
    # Nor is it where no episode is before the one that counts.
    assert "other" not in world_contexts(file, worlds, seeds[:, :1], [])


BAD = {
    "--other x": "--other is for trajectories of one world",
    "--config.agent.reads_positions=True --random 2": "--random 2 are more than",
    "--config.agent.reads_positions=True --episodes 3": "--episodes 3 are more than",
    "--window 1": "--window: must be a whole number",
    "--temperature -1": "--temperature: must be a number of at least 0, got -1",
    "--contexts mine": "--contexts mine: give some of own, empty, none, other",
    "--environments 19": "19 environments do not divide over the batch's 2",
    "--random 0": "--random: must be a whole number",
    "--config.agent.step_tokens=2": "config.agent.step_tokens=2 must be 4, or 1",
    "--config.agent.action_bins=1": "config.agent.action_bins=1 must be at least 2",
    "--config.agent.action_kind=some": "config.agent.action_kind='some' must be one of",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_input_is_refused_with_one_line(directory, tmp_path, capsys, options):
    output = tmp_path / "x.json"
    arguments = flags(directory, *options.split(), "--output", str(output))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and BAD[options] in error
    assert not output.exists()


def cart_poles(directory: Path, worlds: list[HiddenPhysics | None]) -> TrajectoryFile:
    about = {"domain": "cartpole", "task": "swingup", "action_repeat": 10}
    about["worlds_described"] = [each and each.describe() for each in worlds]
    with TrajectoryWriter(directory / "worlds", about) as writer:
        writer.write(np.zeros((2, 5)), np.zeros((2, 1)), np.zeros(2))
    return TrajectoryFile.open(directory / "worlds")


@pytest.mark.thorough
def test_who_knows_a_cart_pole_swings_it_up_and_chance_does_not(tmp_path):
    file = cart_poles(tmp_path, [None, HiddenPhysics(-1, pole_length=1.3)])
    known = references(file, np.array([1, 0]), np.full((2, 1), 7))
    assert list(known) == ["oracle", "random"]
    assert known["oracle"] > 700 and known["random"] < 200
