"""Stages of olmo3_7b and line_retrieval: each goes on with the one before it."""

import json

import pytest
from ml_collections import ConfigDict

from configs import line_retrieval, models
from tasks.text import TextRun
from tests.support.processes import run_program
from training.saved.stored_step import differences, leaves
from training.sharding.mesh import MeshShape, Partition


def fingerprint(config: ConfigDict) -> dict:
    """Of the model, by field; its mesh is of devices that need not be there."""
    mesh = MeshShape(**config.mesh).abstract_mesh()
    return leaves(TextRun(config, Partition(mesh)).fingerprint)


@pytest.mark.parametrize("place", ["v5e", "h200"])
def test_the_longer_stage_starts_where_the_one_before_it_saves(place):
    names = f"olmo3_7b/{place}_8k", f"olmo3_7b/{place}"
    before, after = map(models.get_config, names)
    assert (before.init_from, before.rope_scaling.rope_type) == ("", "none")
    assert after.init_from == before.workdir
    assert after.data.context_tokens == 8 * before.data.context_tokens
    assert after.mesh.ring > before.mesh.ring
    scaling = after.rope_scaling
    original = scaling.original_max_position_embeddings
    assert scaling.factor * original == after.data.context_tokens
    # Parameters that a stage begins with are of its model, but for RoPE.
    both = fingerprint(before), fingerprint(after)
    assert differences(*both) and not differences(*both, after.may_change)


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
