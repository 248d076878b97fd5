"""Agents through the real `train.train`: their curves, their resumption, refusals."""

from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import train
from data.agents.chains import SPLITS, ChainBatch, Chains
from data.agents.trajectory_file import TrajectoryFile
from tasks import trajectories
from tasks.exorl import AgentRun
from tasks.generation import newest_parameters
from tests.cases import table
from tests.cases.attention import QUICK
from tests.small.agents import (
    EPISODE_STEPS,
    ROWS,
    chains_of,
    config_of,
    make_trajectories,
)
from tests.small.runs import read_scalars
from training.saved.weights import SavedParameters

pytestmark = pytest.mark.usefixtures("programs")

STEPS, MIDDLE, BAD = 12, 6, 8


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return make_trajectories(tmp_path_factory.mktemp("data"))


def config_in(workdir: Path, file: TrajectoryFile, **overrides: Any) -> Any:
    fields = dict(table("runs.txt", "exorl"))
    fields |= {"workdir": str(workdir), "data__trajectories": str(file.directory)}
    return config_of(**fields | overrides)


@pytest.fixture(scope="module")
def run(file, tmp_path_factory):
    """A run with a step of bad gradients: its directory, and what it said."""
    workdir, said, read = tmp_path_factory.mktemp("run"), [], Chains.read

    def spoilt(chains: Chains, row: int, index: np.ndarray) -> ChainBatch:
        batch = read(chains, row, index)
        is_bad = row // ROWS == BAD - 1
        return batch._replace(actions=np.nan * batch.actions) if is_bad else batch

    with mock.patch.object(Chains, "read", spoilt):
        train.train(config_in(workdir, file, guard__replay=True), said.append)
    return workdir, said


@pytest.mark.quick
def test_losses_fall_and_have_curves_by_rank_and_by_place(run):
    workdir, said = run
    tags = read_scalars(workdir / "tensorboard")
    # Two episodes of 7 steps, of which the first 4 steps are a part.
    expected = {
        "train": ([*range(1, STEPS + 1)], {"rank_1": 7, "rank_2": 7}),
        "validation": ([MIDDLE, STEPS], {"from_0": 4, "from_4": 10}),
    }
    for split, (steps, counts) in expected.items():
        losses = dict(tags[f"loss/{split}"])
        parts = [dict(tags[f"{split}/loss_{name}"]) for name in counts]
        assert sorted(losses) == steps
        for step, loss in losses.items():
            of_parts = [part[step] for part in parts]
            mean = np.average(of_parts, weights=list(counts.values()))
            assert loss == pytest.approx(mean, rel=1e-5, nan_ok=step == BAD)
        assert parts[0] != parts[1]
    curve = dict(tags["loss/train"])
    assert curve[STEPS] < curve[1] and np.isnan(curve[BAD])
    assert any("striped attention" in line for line in said)
    # The step with bad gradients makes no update, and is replayed.
    assert dict(tags["train/skipped"])[STEPS] == 1
    assert any(f"at step {BAD}: no update" in line for line in said)
    assert any(line.startswith(f"step {BAD} gives the same") for line in said)


def test_a_run_is_refused_where_others_are_held_out_or_data_differ(run, file, tmp_path):
    """Else what was trained on would be evaluated as held out."""
    workdir, _ = run
    config = config_in(workdir, file)
    agent = AgentRun.of(config, jax.devices())
    fingerprint = agent.fingerprint(file)
    assert newest_parameters(agent, fingerprint)[1] == STEPS
    # A part that has its default, but was in the first checkpoints.
    assert "rope_scaling" in fingerprint["model"]
    first, *others = fingerprint["trajectories"]["observation_mean"]
    fingerprint["trajectories"]["observation_mean"] = [first + 0.1, *others]
    with pytest.raises(ValueError, match="observation_mean.0: saved"):
        newest_parameters(agent, fingerprint)
    settings = SavedParameters(workdir).settings
    trajectories.check_trained(config, settings)
    split = config_in(workdir, file, data__held_out_share=0.5)
    trajectories.check_trained(split, {})
    with pytest.raises(ValueError, match=r"split_seed=1, but .* trained with 0"):
        other = config_in(workdir, file, data__split_seed=1)
        trajectories.check_trained(other, settings)
    with pytest.raises(ValueError, match=r"held_out_share=0\.5, but .* with 0\.3: wha"):
        trajectories.check_trained(split, settings)
    longer = make_trajectories(tmp_path, episodes=13)
    with pytest.raises(ValueError, match=r"trajectories\.contents=\w+, but .* with "):
        trajectories.check_trained(config_in(workdir, longer), settings)


def test_tokens_and_pairs_are_those_of_real_steps(file):
    config = config_of()
    batch = chains_of(file, config)
    loss = AgentRun.of(config, jax.devices()[:4]).objective
    tokens, pairs, weights = jax.jit(loss.count, compiler_options=QUICK)(batch)
    real = 4 * 2 * EPISODE_STEPS  # tokens of a row
    assert float(tokens) == 2 * real
    assert float(pairs) == 2 * real * (real + 1) / 2
    assert weights.tolist() == [2 * EPISODE_STEPS] * 2
    config.model.update(layer_pattern="wf", window=5, num_layers=3)
    of_window = sum(min(n, 5) for n in range(1, real + 1))
    mean = (2 * of_window + real * (real + 1) / 2) / 3
    pairs = AgentRun.of(config, jax.devices()[:4]).count(batch)[1]
    assert float(pairs) == pytest.approx(2 * mean, rel=1e-6)


def test_the_best_episodes_are_chosen_among_those_trained_on(file):
    config = config_of(data__top_share=0.5)
    parts = [trajectories.episodes(config_of(), file, name) for name in SPLITS]
    assert sorted(np.concatenate(parts)) == list(range(len(file.returns)))
    training = parts[0]
    best = trajectories.episodes(config, file, "train")
    assert len(best) == len(training) // 2 and set(best) <= set(training)
    others = np.setdiff1d(training, best)
    assert file.returns[best].min() > file.returns[others].max()


@pytest.mark.quick
@pytest.mark.parametrize("field, value, match", table("runs.txt", "agents"))
def test_bad_configs_are_refused_before_anything_is_made(
    file, tmp_path, field, value, match, monkeypatch
):
    monkeypatch.setattr(jax, "jit", mock.Mock(side_effect=AssertionError))
    config = config_in(tmp_path / "run", file, **{field: value})
    with pytest.raises(ValueError, match=match):
        train.train(config, lambda line: None)
    assert not (tmp_path / "run").exists()
