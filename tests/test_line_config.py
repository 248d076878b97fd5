"""configs/line_retrieval.py: its stages, and what they come to."""

import json

import pytest

from configs import line_retrieval
from tests.processes import run_program

STAGES = 32, 160


def test_stages_are_one_model_and_each_begins_with_the_one_before():
    short, long = (line_retrieval.get_config(str(tokens)) for tokens in STAGES)
    assert short.model == long.model
    assert (short.init_from, long.init_from) == ("", short.workdir)
    for stage, tokens in zip((short, long), STAGES, strict=True):
        assert stage.data.context_tokens >= 2 * tokens
    assert {c.data.rows for c in (short, long)} == {"whole"}
    with pytest.raises(ValueError, match="stage '65' is not one of 32, 160"):
        line_retrieval.get_config("65")


def run(*command: object) -> None:
    """A program of this repository, on as many CPU devices as it simulates."""
    status, _, said = run_program(*command, timeout=5400, XLA_FLAGS="")
    assert status == 0, said[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_the_longer_stage_finds_lines_and_the_shorter_one_only_in_its_context(tmp_path):
    """From nothing, with the config's striped ring: minutes on two idle cores."""
    for tokens in STAGES:
        corpus, workdir = tmp_path / f"lines_{tokens}", tmp_path / str(tokens)
        run(
            *("-m", "tools.prepare_lines", "--form", "letters", "--output", corpus),
            *("--context-tokens", tokens, "--train-tokens", 4_000_000),
        )
        flags = [f"--config=configs/line_retrieval.py:{tokens}"]
        flags += [f"--config.workdir={workdir}", f"--config.data.corpus={corpus}"]
        if tokens > min(STAGES):
            flags.append(f"--config.init_from={tmp_path / str(min(STAGES))}")
        run("train.py", *flags)
    run(
        *("-m", "tools.evaluate", "line-retrieval", *flags, "--form", "letters"),
        *("--lengths", ",".join(map(str, STAGES)), "--depths", 5, "--samples", 20),
        *("--compare", tmp_path / str(min(STAGES)), "--output", tmp_path / "lines"),
    )
    rows = json.loads((tmp_path / "lines.json").read_text())
    short, long = STAGES

    def accuracy(stage: int, length: int) -> float:
        mine = str(tmp_path / str(stage)), length
        cells = [row for row in rows if (row["run"], row["length"]) == mine]
        assert len(cells) == 5 and {row["samples"] for row in cells} == {20}
        return sum(row["generated"] for row in cells) / len(cells)

    assert accuracy(long, long) > 0.95 and accuracy(long, short) > 0.95
    assert accuracy(short, long) < accuracy(short, short) - 0.3
