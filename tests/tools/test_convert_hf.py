"""Published weights: logits as Hugging Face's, bit for bit out and in, faults named."""

import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tasks import text
from tests.processes import run_program
from tests.tools import hf_llama
from tools import convert_hf
from tools.convert_hf import export_model, import_model, main
from tools.lib.hf.config import llama_config
from tools.lib.hf.names import WEIGHTS
from tools.lib.hf.tensor_files import WHOLE, TensorFiles
from training.mesh import MeshShape, Partition, make_mesh
from training.weights import SavedParameters

MESHES = {
    "mha": MeshShape(fsdp=8),
    "gqa": MeshShape(fsdp=2, ring=2, tensor=2),
    "tied": MeshShape(data=2, ring=4),
    "llama3": MeshShape(fsdp=4, ring=2),
}
each_model = pytest.mark.parametrize("name", MESHES)


def partition_on(shape: MeshShape) -> Partition:
    return Partition(make_mesh(shape, jax.devices()))


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every readable model, imported through a mesh of its own."""
    root = tmp_path_factory.mktemp("imported")
    for name, shape in MESHES.items():
        import_model(hf_llama.DIRECTORY / name, root / name, partition_on(shape))
    return {name: root / name for name in MESHES}


def restored(workdir: Path, name: str, partition: Partition) -> Any:
    model = text.model(hf_llama.run_config(name), partition)
    abstract = jax.tree.map(
        lambda s, axes: jax.ShapeDtypeStruct(
            s.shape, s.dtype, sharding=partition.sharding(axes, s.shape)
        ),
        model.shapes,
        model.axes,
    )
    return SavedParameters(workdir).restore(abstract)


def tensors(directory: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


def assert_same(found: Any, expected: Any) -> None:
    """Compares names, shapes, types and bits."""

    def check(array: Any, wanted: Any) -> None:
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert np.asarray(array).tobytes() == np.asarray(wanted).tobytes()

    jax.tree.map(check, found, expected)


def changed_copy(tmp_path: Path, name: str, changes: Mapping[str, Any]) -> Path:
    """Copies a model to one file, with other tensors, or none, and fields of config."""
    config, held = hf_llama.fields(name), tensors(hf_llama.DIRECTORY / name)
    for key, value in changes.items():
        (held if "." in key else config)[key] = value
    copy = tmp_path / "changed"
    copy.mkdir()
    (copy / "config.json").write_text(json.dumps(config))
    held = {key: tensor for key, tensor in held.items() if tensor is not None}
    save_file(held, copy / WHOLE, metadata={"format": "pt"})
    return copy


@each_model
def test_logits_and_greedy_tokens_equal_hugging_faces(workdirs, name):
    partition = partition_on(MeshShape(fsdp=2, ring=4))
    parameters = restored(workdirs[name], name, partition)
    tokens, expected = hf_llama.expected(name)
    logits = hf_llama.logits(hf_llama.run_config(name), partition)(parameters, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    # Every token is the likeliest after those before it, as greedy decoding has it.
    followers = tokens[hf_llama.PROMPT :]
    assert followers.size == 32
    best = logits.argmax(axis=-1)[hf_llama.PROMPT - 1 : -1]
    np.testing.assert_array_equal(best, followers)


@each_model
def test_export_gives_back_what_was_imported_bit_for_bit(workdirs, tmp_path, name):
    shape = MeshShape(fsdp=4, tensor=2) if name == "gqa" else MeshShape(fsdp=8)
    partition, out = partition_on(shape), tmp_path / "out"
    source = hf_llama.DIRECTORY / name
    options = {"dtype": "float32", "file_bytes": 20_000, "original": source}
    export_model(str(workdirs[name]), out, partition, **options)
    before, after = tensors(source), tensors(out)
    if name == "tied":
        before["lm_head.weight"] = before["model.embed_tokens.weight"]
    assert_same(after, before)
    assert len(list(out.glob("*.safetensors"))) > 2
    # And in again: the same model, and the same parameters.
    import_model(out, tmp_path / "again", partition)
    first = restored(workdirs[name], name, partition)
    assert_same(restored(tmp_path / "again", name, partition), first)
    written = json.loads((out / "config.json").read_text())
    assert llama_config(written) == llama_config(hf_llama.fields(name))
    assert written["max_position_embeddings"] == 64
    assert written["tie_word_embeddings"] is False


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_numbers_are_read_exactly(workdirs, tmp_path, dtype):
    held = tensors(hf_llama.DIRECTORY / "gqa")
    narrow = {name: tensor.astype(dtype) for name, tensor in held.items()}
    partition = partition_on(MeshShape(fsdp=2, ring=2, tensor=2))
    workdir = tmp_path / "narrow"
    import_model(changed_copy(tmp_path, "gqa", narrow), workdir, partition)
    rounded = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(dtype).astype(np.float32),
        restored(workdirs["gqa"], "gqa", partition),
    )
    assert_same(restored(workdir, "gqa", partition), rounded)
    if dtype == ml_dtypes.bfloat16:  # comes out as it went in
        options = {"dtype": "bfloat16", "file_bytes": 1 << 30}
        export_model(str(workdir), tmp_path / "out", partition, **options)
        assert_same(tensors(tmp_path / "out"), narrow)


def test_every_device_reads_its_own_part_once_and_the_host_no_more(
    tmp_path, monkeypatch
):
    """What is read adds up to the model, and little of it waits for its device."""
    fields = hf_llama.fields("gqa") | {"hidden_size": 256, "intermediate_size": 512}
    partition = partition_on(MeshShape(fsdp=4, ring=2))
    model = convert_hf.model_of(llama_config(fields), partition)
    shapes = convert_hf.stored_shapes(WEIGHTS, model)
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
        parameters = convert_hf.load(files, WEIGHTS, model, partition)
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


def spoiled(value: float, *shape: int) -> np.ndarray:
    """Zeros, the last of which is another number."""
    tensor = np.zeros(shape, np.float32)
    tensor.flat[-1] = value
    return tensor


TENSOR = "model.layers.1.self_attn.k_proj.weight"
WHAT_MODELS_HERE_HAVE = "(only default, linear, yarn, llama3)"

# Tensors and fields of config.json that are others, and what is said of them.
BAD = [
    ({TENSOR: None}, f"{TENSOR} is missing, [20, 32] by config"),
    ({"lm_head.weight": None}, "lm_head.weight is missing, [40, 32] by"),
    ({TENSOR: spoiled(0, 40, 32)}, f"{TENSOR} is [40, 32], but [20, 32] by config.js"),
    ({"lm_head.bias": spoiled(0, 40)}, "lm_head.bias [40] is not a tensor of this mo"),
    ({TENSOR: spoiled(np.nan, 20, 32)}, f"{TENSOR} holds numbers that are not finite"),
    ({"model.norm.weight": spoiled(-np.inf, 32)}, "norm.weight holds numbers that are"),
    ({TENSOR: np.zeros((20, 32), np.int8)}, f"error: {TENSOR} in "),
    ({"num_hidden_layers": (1 << 31) - 1}, "but the files hold 21 tensors in all"),
    ({"hidden_size": (1 << 31) - 1}, "but [40, 2147483647] by config.json; "),
    ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is missing"),
    ({"vocab_size": "40"}, "vocab_size='40' (a whole number from 1"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false', not true or"),
    (
        {"rope_parameters": {"rope_type": "longrope"}},
        f"error: config.json has RoPE scaling 'longrope' {WHAT_MODELS_HERE_HAVE}\n",
    ),
]


def refusal(source: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which an import ends, which leaves no trace."""
    assert main(["import", str(source), str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not out.exists()
    return error


@pytest.mark.parametrize(("changes", "complaint"), BAD)
def test_a_model_that_cannot_be_read_is_refused(tmp_path, changes, complaint, capsys):
    source = changed_copy(tmp_path, "gqa", changes)
    error = refusal(source, tmp_path / "out", capsys)
    assert complaint in error and len(error) < 1000
    named = [name for name in changes if "." in name]
    assert not named or error.count("model.") <= 2  # and no tensor besides


def test_a_field_that_stands_twice_is_refused(tmp_path, capsys):
    source = changed_copy(tmp_path, "gqa", {})
    (source / "config.json").write_text('{"head_dim": 8, "head_dim": 10}')
    error = refusal(source, tmp_path / "out", capsys)
    assert "'head_dim' stands twice in an object" in error


def test_derived_tensors_of_older_files_are_passed_over(workdirs, tmp_path):
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5, np.float32)}
    source, partition = (
        changed_copy(tmp_path, "gqa", derived),
        partition_on(MESHES["gqa"]),
    )
    import_model(source, tmp_path / "out", partition)
    first = restored(workdirs["gqa"], "gqa", partition)
    assert_same(restored(tmp_path / "out", "gqa", partition), first)


def test_program_imports_and_exports_and_brings_the_tokenizer_along(tmp_path):
    source, workdir = hf_llama.DIRECTORY / "mha", tmp_path / "workdir"
    command = "-m", "tools.convert_hf", "import", source, workdir
    code, told, errors = run_program(*command)
    assert (code, errors) == (0, "")
    assert f"--config.init_from={workdir}" in told
    assert "--config.model.norm_epsilon=1e-05" in told
    original = tmp_path / "original"
    (original / "tokenizer").mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer.model", "notes.txt"):
        (original / name).write_text(name)
    config = {"max_position_embeddings": 77, "eos_token_id": 5}
    (original / "config.json").write_text(json.dumps(config))

    def files(out: Path, *options: str) -> set[str]:
        assert main(["export", str(workdir), str(out), *options]) == 0
        assert_same(tensors(out), tensors(source))
        return {path.name for path in out.iterdir()}

    assert files(tmp_path / "own") == {"config.json", WHOLE}
    like, liked = ["--like", str(original), "--file-gigabytes=inf"], tmp_path / "liked"
    kept = {"config.json", WHOLE, "tokenizer.json", "tokenizer.model"}
    assert files(liked, *like) == kept
    assert (liked / "tokenizer.model").read_text() == "tokenizer.model"
    written = json.loads((liked / "config.json").read_text())
    assert written | config == written and written["hidden_size"] == 32
