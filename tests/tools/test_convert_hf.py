"""Published weights: bit for bit in and out, faults named; and what exports say."""

import functools
import itertools
import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data.text.corpus import prepare
from data.text.tokens.published import open_tokenizer
from models.sizes import LanguageModelConfig
from tasks import run_config, state, text
from tasks.command_line import read_config
from tasks.text import TextRun
from tests.cases import pairs, table
from tests.data.test_tokenizer import make_hugging_face
from tests.small.models import partition_of
from tests.tools import hf_models
from tools.convert_hf import export_model, import_model, main
from tools.lib.hf.config import WITH_IMAGES, model_config, text_fields
from tools.lib.hf.names import stored_shapes, text_name, weights_of
from tools.lib.hf.reading import load
from tools.lib.hf.tensor_files import WHOLE, TensorFiles
from training.saved.checkpoint import Checkpoints
from training.saved.record import SETTINGS
from training.saved.stored_step import PARAMETERS
from training.saved.weights import SavedParameters
from training.sharding.mesh import MeshShape

slow = pytest.mark.slow

SHAPES = itertools.cycle(shape for (shape,) in table("models.txt", "imported-on"))
MESHES = {name: MeshShape(**next(SHAPES)) for name in hf_models.NAMES}
EXPORTED = "llama_gqa", "llama_scaled", "qwen2", "gemma3", "olmo2", "phi3", "qwen3_5"
EXPORTED += ("glm4_moe",)
"""By the fast tests: every type, norm, bias, kind of layer, a tied head, fused ones."""
each_model = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[slow] * (n not in EXPORTED)) for n in MESHES]
)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The workdir of a readable model, imported through a mesh of its own."""
    root = tmp_path_factory.mktemp("imported")

    @functools.cache
    def workdir(name: str) -> Path:
        partition = partition_of(MESHES[name])
        import_model(hf_models.DIRECTORY / name, root / name, partition)
        return root / name

    return workdir


def digest(workdir: Path) -> str:
    """Of all parameters' names, shapes, types and bits."""
    return SavedParameters(workdir).digest


def tensors(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compares names, shapes, types and bits."""

    def bits(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
        return {n: (x.shape, x.dtype, x.tobytes()) for n, x in tensors.items()}

    assert bits(found) == bits(expected)


def of_text(held: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a text model, under the names that it has by itself."""
    named = {text_name(name): tensor for name, tensor in held.items()}
    return {name: tensor for name, tensor in named.items() if name}


def changed_copy(tmp_path: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """Copies a model to one file, with other tensors, or none, and fields of config."""
    config, held = hf_models.fields(name), tensors(hf_models.DIRECTORY / name)
    for key, value in changes.items():
        (held if "." in key else config)[key] = value
    copy = tmp_path / "changed"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config))
    held = {key: tensor for key, tensor in held.items() if tensor is not None}
    save_file(held, copy / WHOLE, metadata={"format": "pt"})
    return copy


@pytest.mark.thorough
@each_model
def test_export_gives_back_what_was_imported_bit_for_bit(imported, tmp_path, name):
    """The tensors, in their own type, and what config.json says of the model."""
    shape = MeshShape(fsdp=4, tensor=2) if name == "llama_gqa" else MeshShape(fsdp=8)
    partition, out = partition_of(shape), tmp_path / "out"
    source, fields = hf_models.DIRECTORY / name, hf_models.fields(name)
    assert text.sizes(run_config.read(str(imported(name)))) == model_config(fields)
    options = {"dtype": fields["dtype"], "file_bytes": 20_000, "original": source}
    export_model(str(imported(name)), out, partition, **options)
    held = tensors(source)
    has_images = fields["model_type"] in WITH_IMAGES
    fields = text_fields(fields)
    if has_images:  # of which the text model is written
        held = of_text(held)
        own = ("model_type", "layer_types", "tie_word_embeddings")
        fields = {name: fields[name] for name in fields if name not in own}
    assert_same(tensors(out), held)
    assert len(list(out.glob("*.safetensors"))) >= 2
    # In again it is the same model; but where RoPE stands, transformers reads the same.
    said, config = written(out)
    assert config == model_config(hf_models.fields(name))
    kept = {n: v for n, v in fields.items() if n not in ("dtype", "rope_parameters")}
    assert said | kept == said and said["torch_dtype"] == options["dtype"]


def test_every_device_reads_its_own_part_once_and_the_host_no_more(
    tmp_path, monkeypatch
):
    """What is read adds up to the model, and little of it waits for its device."""
    wide = {"hidden_size": 256, "intermediate_size": 512}
    fields = hf_models.fields("llama_gqa") | wide
    partition = partition_of(MeshShape(fsdp=4, ring=2))
    model = TextRun(hf_models.run_config(model_config(fields)), partition).model
    weights = weights_of(model)
    shapes = stored_shapes(weights, model)
    held = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(held, tmp_path / WHOLE)
    sizes = [tensor.nbytes for tensor in held.values()]
    read: list[int] = []
    waiting: list[int] = [0]  # bytes that are read and on no device yet
    plain_read, plain_put = TensorFiles.read, jax.device_put

    def counted_read(self: TensorFiles, name: str, index: Any) -> np.ndarray:
        part = plain_read(self, name, index)
        read.append(part.nbytes)
        waiting[-1] += part.nbytes
        return part

    def counted_put(part: np.ndarray, device: jax.Device) -> jax.Array:
        waiting.append(0)
        return plain_put(part, device)

    monkeypatch.setattr(TensorFiles, "read", counted_read)
    monkeypatch.setattr(jax, "device_put", counted_put)
    with TensorFiles(tmp_path) as files:
        tracemalloc.start()
        parameters = load(files, weights, model, partition)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    leaves = jax.tree.leaves(parameters)
    shards = [part.data.nbytes for leaf in leaves for part in leaf.addressable_shards]
    # Norm scales lie on all devices and are read once; nothing else is there twice.
    assert sum(read) == sum(sizes)
    assert max(read) <= max(sizes) / 8
    assert max(waiting) == max(shards) < sum(sizes) / 16
    # Devices that are simulated may keep what was read as their own.
    assert peak < sum(sizes) + max(sizes)


TENSOR = "model.layers.1.self_attn.k_proj.weight"
BYTES = ({TENSOR: np.zeros((20, 32), np.int8)}, f"error: {TENSOR} in ")


def damaged(changes: str) -> dict[str, Any]:
    """Fields of config.json and tensors of a line of damaged_models.txt."""
    found = json.loads(changes)
    for name in (n for n, value in found.items() if isinstance(value, list)):
        *shape, last = found[name]
        found[name] = np.zeros(shape, np.float32)
        found[name].flat[-1] = last
    return found


BAD = [
    (damaged(changes.replace('"K"', f'"{TENSOR}"')), said.replace("K ", f"{TENSOR} "))
    for changes, said in pairs("damaged_models.txt")
]


@pytest.mark.parametrize(("changes", "complaint"), [*BAD, BYTES])
def test_a_model_that_cannot_be_read_is_refused(tmp_path, changes, complaint, capsys):
    source, out = changed_copy(tmp_path, "llama_gqa", changes), tmp_path / "out"
    assert main(["import", str(source), str(out)]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and complaint in error and len(error) < 1000
    named = [name for name in changes if "." in name]
    assert not named or error.count("model.") <= 2  # and no tensor besides
    assert not out.exists()


@pytest.mark.thorough
def test_a_tied_head_is_none(imported, tmp_path):
    """Also where the files have it, or tensors of older ones that config.json says."""
    partition = partition_of(MESHES["llama_tied"])
    table = tensors(hf_models.DIRECTORY / "llama_tied")["model.embed_tokens.weight"]
    more = {"lm_head.weight": table}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
    source = changed_copy(tmp_path, "llama_tied", more)
    import_model(source, tmp_path / "out", partition)
    assert digest(tmp_path / "out") == digest(imported("llama_tied"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "prefix",
    ["model.language_model.", pytest.param("language_model.model.", marks=slow)],
)
def test_of_gemma_3_with_images_the_text_is_read_and_the_rest_said(
    imported, tmp_path, capsys, prefix
):
    held = tensors(hf_models.DIRECTORY / "gemma3")
    held = {n.replace("model.", prefix, 1): tensor for n, tensor in held.items()}
    other = prefix.removesuffix("language_model.").removesuffix("language_model.model.")
    images = ("vision_tower.embeddings.bias", "multi_modal_projector.norm.weight")
    held |= {f"{other}{name}": np.ones(3, np.float32) for name in images}
    text_fields = hf_models.fields("gemma3")
    fields = {"model_type": "gemma3", "text_config": text_fields, "vision_config": {}}
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    save_file(held, source / WHOLE)
    assert main(["import", str(source), str(out)]) == 0
    assert "left out: 2 tensors of images (" in capsys.readouterr().out
    assert digest(out) == digest(imported("gemma3"))
    # It goes out as the text model that it is here.
    assert main(["export", str(out), f"{tmp_path}/text", "--like", str(source)]) == 0
    fields, _ = written(tmp_path / "text")
    assert fields["model_type"] == "gemma3_text" and "vision_config" not in fields


def test_numbers_that_a_type_does_not_hold_are_not_written(tmp_path, capsys):
    large = {"model.norm.weight": np.full(32, 1e5, np.float32)}
    partition, workdir = partition_of(MESHES["llama_gqa"]), tmp_path / "large"
    import_model(changed_copy(tmp_path, "llama_gqa", large), workdir, partition)
    out = tmp_path / "out"
    assert main(["export", str(workdir), str(out), "--dtype", "float16"]) == 1
    error = capsys.readouterr().err
    assert "model.norm.weight has numbers beyond float16: choose bfloat16" in error
    assert {path.name for path in tmp_path.iterdir()} == {"changed", "large"}


def test_program_imports_and_exports_and_brings_the_tokenizer_along(
    tmp_path, capsys, bars
):
    source, workdir = hf_models.DIRECTORY / "llama", tmp_path / "workdir"
    assert main(["import", str(source), str(workdir)]) == 0
    printed = capsys.readouterr().out
    command = f"--config=configs/fine_tune.py:{workdir}"
    assert f"python train.py {command} --config.data.corpus=CORPUS" in printed
    assert read_config([command]).model.norm_epsilon == 1e-5
    original = tmp_path / "original"
    (original / "tokenizer").mkdir(parents=True)
    brought = {"tokenizer.json", "tokenizer.model", "chat_template.jinja"}
    for name in (*brought, "notes.txt"):
        (original / name).write_text(name)
    config = {"max_position_embeddings": 77, "eos_token_id": 5, "model_type": "llama"}
    (original / "config.json").write_text(json.dumps(config))

    def files(out: Path, *options: str) -> set[str]:
        assert main(["export", str(workdir), str(out), *options]) == 0
        assert_same(tensors(out), tensors(source))
        return {path.name for path in out.iterdir()}

    assert files(tmp_path / "own") == {"config.json", WHOLE}
    reading, writing = bars
    assert 4 * reading.n == 4 * reading.total > 0
    assert writing.n == writing.total > reading.n
    liked = tmp_path / "liked"
    assert files(liked, "--like", str(original)) == {"config.json", WHOLE, *brought}
    assert (liked / "tokenizer.model").read_text() == "tokenizer.model"
    fields, _ = written(liked)
    assert fields | config == fields and fields["hidden_size"] == 32


# Exports of runs: what they say beside the sizes.


def run_of(directory: Path, settings: dict[str, Any], model: str = "llama") -> str:
    """The workdir of a run with these settings."""
    weights, workdir = directory / "weights", directory / "run"
    partition = partition_of(MeshShape(fsdp=8))
    import_model(hf_models.DIRECTORY / model, weights, partition)
    run = TextRun(run_config.read(str(weights)), partition)
    made, kept = run.model, workdir / "checkpoints"
    like = state.abstract_parameters(made.shapes, made.axes, partition)
    with Checkpoints(kept, keep=1, fingerprint=run.fingerprint) as checkpoints:
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
    like = ["--like", str(hf_models.DIRECTORY / "llama")]
    assert main(["export", run, str(tmp_path / "like"), *like]) == 1
    error = capsys.readouterr().err
    assert "cannot be written as llama: layer_pattern='w', there ''; window=8" in error


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mask", "model"), [("prefix(4)", "llama"), ("window(8)", "gemma2")]
)
def test_a_mask_that_no_model_has_is_not_exported(tmp_path, capsys, mask, model):
    run, out = run_of(tmp_path, {"mask": mask}, model), tmp_path / "out"
    assert main(["export", run, str(out)]) == 1
    (error,) = capsys.readouterr().err.splitlines()
    assert f"config.json cannot say config.mask='{mask}' of the run" in error
    assert not out.exists()


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
