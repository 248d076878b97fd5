"""What 0.1.0 wrote is read, and what is written now is the same (docs/formats.md)."""

import json
import shutil

import jax
import numpy as np
import pytest

from data.agents.trajectory_file import TrajectoryFile
from data.text.tokens.token_file import TokenFile
from tasks import run_config
from tasks.task import run_settings
from tasks.text import TextRun
from tests.cases.attention import QUICK
from tests.fixtures import make_formats
from tests.small.runs import checkpoints_of, files
from training.saved import record
from training.sharding.feed import global_batch
from training.step import make_evaluate_step

FORMATS = make_formats.ROOT / make_formats.FORMATS


@pytest.mark.parametrize("name", ["corpus", "trajectories"])
def test_data_are_written_as_they_were(name, tmp_path):
    getattr(make_formats, f"write_{name}")(tmp_path / name)
    assert files(tmp_path / name) == files(FORMATS / name)


def test_data_are_read_as_they_were():
    corpus = TokenFile.open(FORMATS / "corpus", "train")
    assert corpus.tokens[:].tolist() == [*range(40)]
    assert corpus.starts.tolist() == [0, 25]
    assert corpus.segments.tolist() == [[0, 0], [10, 1], [18, 2], [25, 0]]
    np.testing.assert_array_equal(corpus.weights(np.arange(40)), np.arange(40) / 8)
    episodes = TrajectoryFile.open(FORMATS / "trajectories")
    assert episodes.lengths.tolist() == 3 * [3, 4]
    # The first step of the second episode: observation, action, target, reward.
    ((x, y, action, *_, reward),) = episodes.read(np.array([7 + 3]))
    assert (x, y, action, reward) == (0, 1, 0, 0.5)


def test_a_run_goes_on_with_the_loss_that_it_had(tmp_path, monkeypatch):
    """Its config, its record, and parameters whose validation loss is the same."""
    monkeypatch.chdir(make_formats.ROOT)
    workdir = tmp_path / "run"
    shutil.copytree(FORMATS / "run", workdir)
    config = run_config.read(str(workdir))
    made = make_formats.run_config(workdir)
    made.model.vocab_size = 264  # known from the corpus when the run began
    assert config.to_dict() == made.to_dict()
    run = TextRun.of(config, jax.devices())
    said = []
    with checkpoints_of(config) as checkpoints:
        state, _ = checkpoints.restore(run.state_like)
        settings = run_settings(config, said.append)
        saved = checkpoints.records()
        defaults = run_config.defaults("text")
        record.continued(saved, settings, (), said.append, defaults)
    moved = (
        f"changed since step 1: workdir: {make_formats.FORMATS / 'run'} -> {workdir}"
    )
    assert (int(state.step), said) == (1, [moved])
    last = (FORMATS / "run" / "metrics.jsonl").read_text().splitlines()[1]
    batch = global_batch(run.validation()[0], run.sharding, run.shape)
    evaluate = make_evaluate_step(run.held_out.loss_sum, run.held_out.count)
    evaluate = jax.jit(evaluate, compiler_options=QUICK)
    loss, weight = evaluate(state.params, batch)
    mean = loss.sum() / weight.sum()
    assert float(mean) == pytest.approx(json.loads(last)["loss/validation"], rel=1e-5)
