"""Stages of grow_context and line_retrieval: each goes on with the one before it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_collections import ConfigDict

import train
from configs import grow_context, line_retrieval
from tests.cases import table
from tests.processes import run_program
from tests.small.runs import SMALL, Run, files

pytestmark = pytest.mark.usefixtures("programs")

STEPS = 12

# What makes a stage a run of seconds; its context and mesh are given apart.
TINY = SMALL | dict(table("runs.txt", "stage"))


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
    names = "4096", "32768", "fresh"
    first, grown, scratch = (Run(corpus, workdirs / name).losses() for name in names)
    assert len(grown) == len(scratch) == STEPS and np.isfinite(grown).all()
    assert (grown < scratch).all()
    # It starts where the first stage ended, and not at the loss of random parameters.
    assert abs(grown[0] - first[-1]) < 0.3 * (first[0] - first[-1])
    assert scratch[0] == pytest.approx(first[0], abs=0.1)

    # Run again, it resumes its own checkpoint, and not the first stage's.
    said.clear()
    again = stage("32768", corpus, workdirs, **{"train.extra_steps": 1})
    train.train(again, said.append)
    assert f"resuming from step {STEPS}" in said and start not in said


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
    with pytest.raises(ValueError, match="'5000' is not one of 4096, 32768, 262144"):
        grow_context.get_config("5000")


LINES = 32, 160


def test_stages_are_one_model_and_each_begins_with_the_one_before():
    short, long = (line_retrieval.get_config(str(tokens)) for tokens in LINES)
    assert short.model == long.model
    assert (short.init_from, long.init_from) == ("", short.workdir)
    for stage, tokens in zip((short, long), LINES, strict=True):
        assert stage.data.context_tokens >= 2 * tokens
    assert {c.data.rows for c in (short, long)} == {"whole"}
    with pytest.raises(ValueError, match="stage '65' is not one of 32, 160"):
        line_retrieval.get_config("65")


def program(*command: object) -> None:
    """A program of this repository, on as many CPU devices as it simulates."""
    status, _, said = run_program(*command, timeout=5400, XLA_FLAGS="")
    assert status == 0, said[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_longer_stage_finds_lines_and_the_shorter_one_only_in_its_context(tmp_path):
    """From nothing, with the config's striped ring: minutes on two idle cores."""
    for tokens in LINES:
        corpus, workdir = tmp_path / f"lines_{tokens}", tmp_path / str(tokens)
        program(
            *("-m", "tools.prepare_lines", "--form", "letters", "--output", corpus),
            *("--context-tokens", tokens, "--train-tokens", 4_000_000),
        )
        flags = [f"--config=configs/line_retrieval.py:{tokens}"]
        flags += [f"--config.workdir={workdir}", f"--config.data.corpus={corpus}"]
        if tokens > min(LINES):
            flags.append(f"--config.init_from={tmp_path / str(min(LINES))}")
        program("train.py", *flags)
    found = {}
    for stage in LINES:
        flags[1] = f"--config.workdir={tmp_path / str(stage)}"
        program(
            *("-m", "tools.evaluate", "ruler", *flags, "--tasks", "lines"),
            *("--form", "letters", "--lengths", ",".join(map(str, LINES))),
            *("--samples", 100, "--output", tmp_path / f"found_{stage}"),
        )
        scores = json.loads((tmp_path / f"found_{stage}/scores.json").read_text())
        found[stage] = [row["score"] for row in scores["rows"]]
    (short, beyond), long = (found[stage] for stage in LINES)
    assert min(long) > 95 and beyond < short - 30
