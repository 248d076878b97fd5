"""Stages of context: each goes on with the parameters of the one before it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

import train
from configs import grow_context
from tests.runs import SMALL, files
from training.sinks import read_scalars

pytestmark = pytest.mark.usefixtures("programs")

STEPS = 12

# What makes a stage a run of seconds; its context and mesh are given apart.
TINY = SMALL | {
    "model.vocab_size": 264,
    "compute_dtype": "float32",
    "optimizer.peak_lr": 1e-2,
    "train.steps": STEPS,
    "train.microbatches": 1,
    "train.validation_batches": 0,
    "checkpoint.save_every_steps": STEPS,
}


def stage(number: str, corpus: Path, workdirs: Path, **overrides: Any) -> ConfigDict:
    """A stage of configs/grow_context.py, with tokens, devices and sizes made small.

    4096 tokens become 32 on a ring of 2, and 32,768 become 256 on a ring of 4.
    """
    config = grow_context.get_config(number)
    scaling, start = config.rope_scaling, config.init_from
    tokens = config.data.context_tokens // 128
    ring = {32: 2, 256: 4}[tokens]
    original = scaling.original_max_position_embeddings // 128
    small = {
        "workdir": str(workdirs / number),
        "init_from": start and str(workdirs / Path(start).name),
        "data.corpus": str(corpus),
        "data.context_tokens": tokens,
        "mesh.fsdp": 8 // ring,
        "mesh.ring": ring,
        "rope_scaling.original_max_position_embeddings": original,
    }
    with config.unlocked():
        config.update_from_flattened_dict(TINY | small | overrides)
    return config


def losses(workdir: Path) -> np.ndarray:
    return np.array([x for _, x in read_scalars(workdir / "tensorboard")["train/loss"]])


@pytest.mark.slow
def test_a_longer_stage_goes_on_from_the_shorter_one(corpus, tmp_path):
    workdirs, said = tmp_path, []
    train.train(stage("4096", corpus, workdirs), lambda line: None)
    before = files(workdirs / "4096")
    config = stage("32768", corpus, workdirs)
    assert config.rope_scaling.factor == 8 and config.rope_scaling.rope_type == "yarn"
    assert train.train(config, said.append)["step"] == STEPS
    assert "mesh: data 1 x fsdp 2 x ring 4 x tensor 1, of 8 x cpu" in said
    start = f"parameters: of step {STEPS} of {workdirs}/4096"
    assert start in said
    assert files(workdirs / "4096") == before

    alone = {"init_from": "", "workdir": str(workdirs / "fresh")}
    train.train(stage("32768", corpus, workdirs, **alone), lambda line: None)
    grown, scratch = losses(workdirs / "32768"), losses(workdirs / "fresh")
    assert len(grown) == len(scratch) == STEPS and np.isfinite(grown).all()
    assert (grown < scratch).all()
    # It starts where the first stage ended, and not at the loss of random parameters.
    first = losses(workdirs / "4096")
    assert abs(grown[0] - first[-1]) < 0.3 * (first[0] - first[-1])
    assert scratch[0] == pytest.approx(first[0], abs=0.1)

    # Run again, it resumes its own checkpoint, and not the first stage's.
    said.clear()
    again = stage("32768", corpus, workdirs, **{"train.extra_steps": 1})
    train.train(again, said.append)
    assert f"resuming from step {STEPS}" in said and start not in said


def test_an_unknown_stage_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'5000' is not one of 4096, 32768, 262144"):
        grow_context.get_config("5000")


def test_every_stage_starts_where_the_one_before_it_saves():
    stages = [grow_context.get_config(name) for name in ("4096", "32768", "262144")]
    assert stages[0].init_from == ""
    assert stages[0].rope_scaling.rope_type == "none"
    for before, after in zip(stages, stages[1:], strict=False):
        assert after.init_from == before.workdir
        assert after.data.context_tokens == 8 * before.data.context_tokens
        assert after.mesh.ring > before.mesh.ring
        scaling = after.rope_scaling
        original = scaling.original_max_position_embeddings
        assert scaling.factor * original == after.data.context_tokens
    tokens = {s.data.context_tokens * s.data.batch_rows for s in stages}
    assert tokens == {512 * 1024}
