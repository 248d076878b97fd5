"""An agent of four steps an episode in the real cart-pole: what is written, refused."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from data.agents.chains import hold_out
from data.agents.environments import Environment
from data.agents.trajectory_file import TrajectoryFile, TrajectoryWriter, identify
from tasks import base, exorl
from tests.small_agent import SMALL, config_of, drawn
from tools.lib.evaluation.exorl import main
from tools.lib.exorl.scenes import Stage
from tools.lib.exorl.scores import interval, scores
from training.weights import SavedParameters, save_parameters

REPEAT = 250  # of 1000 steps
FIELDS = {
    "agent__observation_size": 5,
    "agent__action_size": 1,
    "agent__episode_steps": 1000 // REPEAT,
    "data__context_tokens": 32,
    "mesh__ring": 2,
    "simulated_devices": 0,
}


def flags(directory: Path, *options: str) -> list[str]:
    """Arguments that mean `config_of(**FIELDS)`, on all devices."""
    values = {name.replace("__", "."): value for name, value in FIELDS.items()}
    values = SMALL | values | {"mesh.data": 4, "workdir": f"{directory}/run"}
    values |= {"data.trajectories": f"{directory}/trajectories"}
    arguments = [f"--config.{name}={value}" for name, value in values.items()]
    size = ["--environments", "4", "--episodes", "2"]
    return ["--config=configs/exorl_tiny.py", *arguments, *size, *options]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trajectories, and parameters of an agent that was not trained."""
    directory = tmp_path_factory.mktemp("agent")
    rng = np.random.default_rng(0)
    about = {"domain": "cartpole", "task": "swingup", "action_repeat": REPEAT}
    about["worlds_described"] = [None]  # as what is packed of ExoRL has it
    with TrajectoryWriter(directory / "trajectories", about) as writer:
        for _ in range(12):
            actions = rng.uniform(-1, 1, (4, 1))
            writer.write(rng.normal(size=(4, 5)), actions, rng.uniform(size=4))
    file = TrajectoryFile.open(directory / "trajectories")
    config = config_of(**FIELDS | {"mesh__data": 4})
    partition = base.partition(config, jax.devices())
    model = exorl.model(config, partition)
    fingerprint = exorl.fingerprint(model, file)
    save_parameters(directory / "run", drawn(model, partition), fingerprint)
    return directory


@pytest.fixture(scope="module")
def written(directory: Path) -> Path:
    output = directory / "results.json"
    shutil.copytree(directory / "trajectories", directory / "other")
    other = ("--other", f"{directory}/other", "--output", str(output))
    assert main(flags(directory, *other)) == 0
    return output


@pytest.mark.thorough
def test_returns_and_scores_are_written_by_context(directory, written):
    results = json.loads(written.read_text())
    assert (results["task"], results["step"]) == ("cartpole swingup", 0)
    assert results["action_repeat"] == REPEAT
    assert results["environment"]["device_count"] == 8
    assert results["config"]["data"]["trajectories"] == f"{directory}/trajectories"
    assert list(results["contexts"]) == ["own", "empty", "recorded", "other"]
    file = TrajectoryFile.open(directory / "trajectories")
    training, _ = hold_out(file.worlds, SMALL["data.held_out_share"])
    assert results["target"] == file.returns[training].max()
    saved = SavedParameters(directory / "run")
    assert saved.settings == {}
    assert results["digests"]["parameters"] == saved.digest
    assert results["digests"]["trajectories"] == identify(file.directory)[0]
    for name, outcome in results["contexts"].items():
        returns = np.array(outcome["returns"])
        is_recorded = name in ("recorded", "other")
        assert returns.shape == (4, 1 if is_recorded else 2)
        best, scored = returns.max(axis=1).mean(), outcome["scores"]
        assert scored["best_of_n"]["mean"] == pytest.approx(best, abs=1e-4)
        assert scored["last"]["mean"] == pytest.approx(returns[:, -1].mean(), abs=1e-4)
        before = np.array(outcome["recorded_returns"])
        assert before.shape == (4, 1 if is_recorded else 0)
        for value in before.ravel():
            assert np.abs(file.returns - value).min() < 1e-3
    own, empty = (np.array(results["contexts"][n]["returns"]) for n in ("own", "empty"))
    np.testing.assert_array_equal(own[:, 0], empty[:, 0])
    assert (own[:, 1] != empty[:, 1]).any()
    assert np.array(results["seeds"]).shape == (4, 2)


BAD = {
    "--episodes 3": "--episodes 3 are more than the agent was trained with",
    "--environments 0": "--environments: must be a whole number",
    "--random 1": "--random is for trajectories of many worlds: leave it out",
    "--trained": "--trained is for trajectories of many worlds: leave it out",
    "--target 0": "--target must be a number above 0, got 0.0",
    "--target inf": "--target must be a number above 0, got inf",
    "--config.agent.chain_length=1 --other x": "--other is for agents of",
    "--config.agent.chain_length=1 --window 2": "--window is for agents of",
    "--config.agent.action_size=2": "action_size=2, but",
    "--config.agent.return_scale=8": "return_scale: saved 7.0, this run 8.0",
    "--config.data.held_out_share=0.05": "chain of 2 episodes cannot be made",
    "--config.workdir=nowhere": "nowhere has no checkpoints",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_input_is_refused_with_one_line(directory, tmp_path, capsys, options):
    output = tmp_path / "x.json"
    arguments = flags(directory, *options.split(), "--output", str(output))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and BAD[options] in error
    assert not output.exists()


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


def test_held_actions_sum_rewards_and_seeds_begin_episodes():
    task, action = ("cartpole", "swingup"), np.full(1, 0.3, np.float32)
    stage = Stage(task, [None], np.array([[7, 7, 8]]), action_repeat=300)
    first = stage.begin(0)
    outcomes = [stage.step(action[None]) for _ in range(4)]
    assert [outcome.last for outcome in outcomes] == [False, False, False, True]
    np.testing.assert_array_equal(stage.begin(1), first)
    assert (stage.begin(2) != first).any()
    environment = Environment(*task)
    environment.reset(7)
    total = sum(environment.step(action).reward for _ in range(1000))
    assert sum(outcome.rewards[0] for outcome in outcomes) == pytest.approx(total)
