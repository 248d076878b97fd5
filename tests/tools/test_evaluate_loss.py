"""Losses by position: those written out, on any mesh, and those of a validation."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.text.corpus import prepare
from data.text.tokenizer import ByteTokenizer, open_tokenizer
from tasks import run_config, text
from tasks.generation import restored_parameters
from tasks.text import TextRun
from tests.data.test_tokenizer import make_hugging_face
from tests.hard_rows import token_losses
from tests.runs import small_config
from tests.small_llama import partition_of
from tests.tools.test_generate import save
from tools import figures
from tools.lib.evaluation.loss import main, set_corpus
from training.mesh import MeshShape

SIZES = {"simulated_devices": 0, "implementation": "reference"}


@pytest.fixture(scope="module")
def workdir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run, with a checkpoint of random parameters."""
    directory = tmp_path_factory.mktemp("run")
    config = small_config(corpus, directory, **SIZES)
    save(config)
    run_config.write(config, {"model.vocab_size": 264})
    return directory


def evaluate(workdir: Path, output: Path, *flags: str) -> list[dict[str, Any]]:
    arguments = [f"--workdir={workdir}", *flags, "--output", str(output / "losses")]
    assert main(arguments) == 0
    assert (output / "losses.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "losses.json").read_text())


def written_out(corpus: Path, workdir: Path, tokens: int, by: str) -> dict:
    """Losses of the tokens of all rows, by part: float64, one device, by a loop."""
    fields = {"attention": "vanilla", "data__context_tokens": tokens}
    config = small_config(corpus, workdir, **SIZES | fields)
    partition = partition_of(MeshShape())
    config.mesh.update(data=1, fsdp=1, ring=1, tensor=1)
    parameters = jax.device_get(restored_parameters(TextRun(config, partition))[0])
    config.data.batch_rows = 1
    batches = TextRun(config, partition).batches("validation")
    found: dict[int, list[float]] = {}
    sizes = text.sizes(config)
    for step in range(len(batches)):
        (batch,) = batches[step].values()
        losses = token_losses(sizes, parameters, batch)
        for row, column in zip(*np.nonzero(batch.loss_weights), strict=True):
            place = column if by == "row" else batch.positions[row, column]
            below = 1
            while below <= place:
                below *= 2
            found.setdefault(below, []).append(losses[row, column])
    return found


MESHES = [
    ("row", 80, []),  # as it was trained: striped, fsdp 2 x ring 4
    ("document", 77, ["--config.attention=zigzag"]),
    pytest.param(
        "document",
        80,
        ["--config.attention=vanilla", "--config.mesh.ring=1", "--config.mesh.tensor=2"]
        + ["--config.mesh.fsdp=4"],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(("by", "tokens", "flags"), MESHES)
def test_losses_of_all_parts_are_those_written_out(
    corpus, workdir, tmp_path, capsys, by, tokens, flags
):
    flags = [f"--config.data.context_tokens={tokens}", "--by", by, *flags]
    flags += ["--corpus", str(corpus)]
    *parts, whole = evaluate(workdir, tmp_path, *flags)
    wanted = written_out(corpus, workdir, tokens, by)
    assert [part["below"] for part in parts] == sorted(wanted)
    assert (whole["from"], whole["below"]) == (0, None)
    every = [loss for losses in wanted.values() for loss in losses]
    for row, losses in zip([*parts, whole], [*wanted.values(), every], strict=True):
        losses = wanted.get(row["below"], losses)
        assert (row["tokens"], row["by"], row["step"]) == (len(losses), by, 7)
        assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))
    assert ("padded to 80" in capsys.readouterr().out) == (tokens == 77)
    drawn = ["losses", *2 * [str(tmp_path / "losses.json")]]
    assert figures.main([*drawn, "--output", str(tmp_path / "two.png")]) == 0


def test_another_corpus_is_read_if_its_tokenizer_is_the_runs(corpus, tmp_path, capsys):
    config = small_config(corpus, Path("run"), model__vocab_size=264)
    files = [tmp_path / f"{name}.txt" for name in "abcdefghijklmnop"]
    for file in files:
        file.write_text(f"Of the ring, {file.stem}. " * 40)
    # With as many ids.
    subwords = open_tokenizer(str(make_hugging_face(tmp_path / "tokenizer.json")))
    for name, tokenizer in ("bytes", ByteTokenizer()), ("subwords", subwords):
        prepare(files, tmp_path / name, tokenizer, validation_fraction=0.5)
    set_corpus(config, tmp_path / "bytes")
    assert config.data.corpus == str(tmp_path / "bytes")
    with pytest.raises(ValueError, match="differ in their vocabulary"):
        set_corpus(config, tmp_path / "subwords")
    assert not capsys.readouterr().out
    config.data.corpus = "gone"
    set_corpus(config, tmp_path / "bytes")
    assert "the run's corpus (gone) is not here: nothing" in capsys.readouterr().out


def test_rows_that_no_batch_holds_are_refused(workdir, tmp_path, capsys):
    tokens = "--config.data.context_tokens=90000"
    assert main([f"--workdir={workdir}", tokens, "--output", str(tmp_path / "x")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "do not fit in the" in error
    assert list(tmp_path.iterdir()) == []
