"""What exports say of the run that made a model, beside its sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from data.text.corpus import prepare
from data.text.tokenizer import open_tokenizer
from models.sizes import LanguageModelConfig
from tasks import frozen, run_config
from tasks.text import TextRun
from tests.data.test_tokenizer import make_hugging_face
from tests.small_llama import partition_of
from tests.tools import hf_models
from tools.convert_hf import import_model, main
from tools.lib.hf.config import model_config
from training.checkpoint import Checkpoints
from training.mesh import MeshShape
from training.record import SETTINGS
from training.stored_step import PARAMETERS
from training.weights import SavedParameters

LLAMA = hf_models.DIRECTORY / "llama"


def run_of(directory: Path, settings: dict[str, Any], model: str = "llama") -> str:
    """The workdir of a run with these settings."""
    weights, workdir = directory / "weights", directory / "run"
    partition = partition_of(MeshShape(fsdp=8))
    import_model(hf_models.DIRECTORY / model, weights, partition)
    config = run_config.read(str(weights))
    run = TextRun(config, partition)
    made = run.model
    like = frozen.abstract_parameters(made.shapes, made.axes, partition)
    with Checkpoints(
        workdir / "checkpoints", keep=1, fingerprint=run.fingerprint
    ) as checkpoints:
        checkpoints.record = {SETTINGS: settings}
        checkpoints.save(1, {PARAMETERS: SavedParameters(weights).restore(like)})
    return str(workdir)


def written(directory: Path) -> tuple[dict[str, Any], LanguageModelConfig]:
    """config.json of an export, and the model that it describes."""
    fields = json.loads((directory / "config.json").read_text())
    return fields, model_config(fields)


def test_a_window_of_the_run_is_one_of_every_layer(tmp_path, capsys):
    settings = {"mask": "window(8)", "data.context_tokens": 48}
    run, out = run_of(tmp_path, settings), tmp_path / "out"
    assert main(["export", run, str(out)]) == 0
    fields, config = written(out)
    assert fields["max_position_embeddings"] == 48
    assert fields["model_type"] == "mistral" and fields["sliding_window"] == 8
    assert (config.layer_pattern, config.window) == ("w", 8)
    # LLaMA has no windows.
    command = ["export", run, str(tmp_path / "like"), "--like", str(LLAMA)]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "cannot be written as llama: layer_pattern='w', there ''; window=8" in error


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mask", "model"), [("prefix(4)", "llama"), ("window(8)", "gemma2")]
)
def test_a_mask_that_no_model_has_is_not_exported(tmp_path, capsys, mask, model):
    run, out = run_of(tmp_path, {"mask": mask}, model), tmp_path / "out"
    assert main(["export", run, str(out)]) == 1
    error = capsys.readouterr().err
    assert f"config.json cannot say config.mask='{mask}' of the run" in error
    assert error.count("\n") == 1 and not out.exists()


def test_without_like_an_export_has_the_tokenizer_of_the_run(tmp_path, capsys):
    """Or says why it has none."""
    run = run_of(tmp_path, {})
    command = ["export", run, str(tmp_path / "bare")]
    assert main(command) == 0
    assert "without a tokenizer and ids of special tok" in capsys.readouterr().out
    path = make_hugging_face(tmp_path / "tokenizer.json")
    tokenizer = open_tokenizer(str(path))
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / name).write_text(f"{name} text")
    prepare([tmp_path / "texts"], tmp_path / "corpus", tokenizer)
    config = run_config.read(f"{tmp_path}/weights")
    config.workdir, config.data.corpus = run, str(tmp_path / "corpus")
    config.model.vocab_size = tokenizer.vocab_size
    run_config.write(config)
    assert main(["export", run, str(tmp_path / "own")]) == 0
    fields, _ = written(tmp_path / "own")
    ends = fields["eos_token_id"]
    assert (ends if isinstance(ends, list) else [ends]) == [*tokenizer.stop_tokens]
    copy = open_tokenizer(f"{tmp_path}/own/tokenizer.json")
    assert copy.encode("a text").tolist() == tokenizer.encode("a text").tolist()
    assert copy.stop_tokens == tokenizer.stop_tokens
