"""Published weights: logits as Hugging Face's, bit for bit out and in, faults named."""

import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import traverse_util
from safetensors.numpy import load_file, save_file

from tasks import text
from tests.tools import hf_llama
from tools import convert_hf
from tools.convert_hf import export_model, import_model, main
from tools.lib.hf.config import llama_config
from tools.lib.hf.names import WEIGHTS
from tools.lib.hf.tensor_files import INDEX, TensorFiles
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


def changed_copy(tmp_path: Path, name: str, change: Any) -> Path:
    """A copy of a model in one file, its tensors changed in place by `change`."""
    copy = tmp_path / "changed"
    copy.mkdir(exist_ok=True)
    shutil.copyfile(hf_llama.DIRECTORY / name / "config.json", copy / "config.json")
    held = tensors(hf_llama.DIRECTORY / name)
    change(held)
    save_file(held, copy / "model.safetensors", metadata={"format": "pt"})
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


def test_a_scaling_that_models_here_have_not_is_refused(tmp_path, capsys):
    source = changed_copy(tmp_path, "llama3", lambda held: None)
    config = source / "config.json"
    config.write_text(config.read_text().replace('"llama3"', '"longrope"'))
    assert main(["import", str(source), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    scaling = "config.json has RoPE scaling 'longrope'"
    assert error == f"error: {scaling} (only default, linear, yarn, llama3)\n"
    assert not (tmp_path / "out").exists()


@each_model
def test_export_gives_back_what_was_imported_bit_for_bit(workdirs, tmp_path, name):
    partition = partition_on(
        MeshShape(fsdp=4, tensor=2) if name == "gqa" else MeshShape(fsdp=8)
    )
    source = hf_llama.DIRECTORY / name
    export_model(
        str(workdirs[name]),
        tmp_path / "out",
        partition,
        dtype="float32",
        file_bytes=20_000,
        original=source,
    )
    before, after = tensors(source), tensors(tmp_path / "out")
    if name == "tied":
        before["lm_head.weight"] = before["model.embed_tokens.weight"]
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype == np.float32
        np.testing.assert_array_equal(tensor, after[key], err_msg=key)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"].keys() == after.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in after.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files == sorted(
        path.name for path in (tmp_path / "out").glob("*.safetensors")
    )
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    # And in again: the same model, and the same parameters.
    import_model(tmp_path / "out", tmp_path / "again", partition)
    first, again = (
        restored(workdir, name, partition)
        for workdir in (workdirs[name], tmp_path / "again")
    )
    jax.tree.map(np.testing.assert_array_equal, first, again)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert llama_config(written) == llama_config(hf_llama.fields(name))
    assert written["max_position_embeddings"] == 64
    assert written["tie_word_embeddings"] is False


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_numbers_are_read_exactly(workdirs, tmp_path, dtype):
    def narrow(held: dict[str, np.ndarray]) -> None:
        for key in held:
            held[key] = held[key].astype(dtype)

    partition = partition_on(MeshShape(fsdp=2, ring=2, tensor=2))
    source = changed_copy(tmp_path, "gqa", narrow)
    import_model(source, tmp_path / "narrow", partition)
    wide = restored(workdirs["gqa"], "gqa", partition)
    for path, leaf in traverse_util.flatten_dict(
        restored(tmp_path / "narrow", "gqa", partition)
    ).items():
        original = np.asarray(traverse_util.flatten_dict(wide)[path])
        assert leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf, original.astype(dtype).astype(np.float32))
    # bfloat16 comes out as it went in.
    if dtype == ml_dtypes.bfloat16:
        export_model(
            str(tmp_path / "narrow"),
            tmp_path / "out",
            partition,
            dtype="bfloat16",
            file_bytes=1 << 30,
        )
        before, after = tensors(source), tensors(tmp_path / "out")
        for key, tensor in before.items():
            assert after[key].dtype == dtype
            np.testing.assert_array_equal(
                tensor.view(np.uint16), after[key].view(np.uint16), err_msg=key
            )


def test_every_device_reads_its_own_part_once_and_the_host_no_more(
    tmp_path, monkeypatch
):
    """What is read adds up to the model, and little of it waits for its device."""
    fields = hf_llama.fields("gqa") | {"hidden_size": 256, "intermediate_size": 512}
    config = llama_config(fields)
    partition = partition_on(MeshShape(fsdp=4, ring=2))
    model = convert_hf.model_of(config, partition)
    source = tmp_path / "source"
    source.mkdir()
    rng = np.random.default_rng(5)
    held = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in convert_hf.stored_shapes(WEIGHTS, model).items()
    }
    save_file(held, source / "model.safetensors")
    largest = max(tensor.nbytes for tensor in held.values())
    total = sum(tensor.nbytes for tensor in held.values())
    held.clear()
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
    with TensorFiles(source) as files:
        tracemalloc.start()
        parameters = convert_hf.load(files, WEIGHTS, model, partition)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    shards = [
        shard.data.nbytes
        for leaf in jax.tree.leaves(parameters)
        for shard in leaf.addressable_shards
    ]
    # Norm scales lie on all devices and are read once; nothing else is there twice.
    assert sum(read) == total
    assert max(read) <= largest / 8
    assert max(waiting) == max(shards) < total / 16
    # Devices that are simulated may keep what was read as their own.
    assert peak < total + largest


TENSOR = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda held: held.pop(TENSOR), f"{TENSOR} is missing, [20, 32] by config"),
        (
            lambda held: held.update({TENSOR: np.zeros((40, 32), np.float32)}),
            f"{TENSOR} is [40, 32], but [20, 32] by config.json",
        ),
        (
            lambda held: held.update({"lm_head.bias": np.zeros(40, np.float32)}),
            "lm_head.bias [40] is not a tensor of this model",
        ),
        (
            lambda held: held.update({TENSOR: np.zeros((20, 32), np.int8)}),
            f"{TENSOR} in ",
        ),
        (
            lambda held: held[TENSOR].__setitem__((3, 7), np.nan),
            f"{TENSOR} holds numbers that are not finite",
        ),
        (
            lambda held: held["model.norm.weight"].__setitem__(0, -np.inf),
            "model.norm.weight holds numbers that are not finite",
        ),
    ],
)
def test_a_wrong_tensor_is_named_and_nothing_is_written(
    tmp_path, change, complaint, capsys
):
    source = changed_copy(tmp_path, "gqa", change)
    assert main(["import", str(source), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and complaint in error
    assert error.count("model.") <= 2 and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "fields, complaint",
    [
        ({"num_hidden_layers": (1 << 31) - 1}, "but the files hold 21 tensors in all"),
        ({"hidden_size": (1 << 31) - 1}, "but [40, 2147483647] by config.json; "),
        ({"num_hidden_layers": 3}, "layers.2.input_layernorm.weight is missing"),
        ({"vocab_size": "40"}, "vocab_size='40' (a whole number from 1"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false', not true or"),
        ("[" * 100_000, "config.json is not JSON (its lists and objects lie too deep"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "an integer of thousands of digits"),
        ('{"head_dim": 8, "head_dim": 10}', "'head_dim' stands twice in an object"),
        ("null", "config.json must be a JSON object, got NoneType"),
    ],
)
def test_a_wrong_config_is_refused_in_a_line(tmp_path, fields, complaint, capsys):
    source = tmp_path / "source"
    shutil.copytree(hf_llama.DIRECTORY / "gqa", source)
    if isinstance(fields, dict):
        fields = json.dumps(hf_llama.fields("gqa") | fields)
    (source / "config.json").write_text(fields)
    assert main(["import", str(source), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and complaint in error
    assert error.count("\n") == 1 and len(error) < 1000
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["nan", "0", "-1", "five"])
def test_files_of_no_size_are_refused(tmp_path, size, capsys):
    arguments = ["export", "x", str(tmp_path / "out"), f"--file-gigabytes={size}"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "--file-gigabytes: must be a number" in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_derived_tensors_of_older_files_are_passed_over(workdirs, tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    source = changed_copy(
        tmp_path, "gqa", lambda held: held.update({name: np.ones(5, np.float32)})
    )
    partition = partition_on(MESHES["gqa"])
    import_model(source, tmp_path / "out", partition)
    jax.tree.map(
        np.testing.assert_array_equal,
        restored(tmp_path / "out", "gqa", partition),
        restored(workdirs["gqa"], "gqa", partition),
    )


def test_a_head_without_tensor_is_missing_unless_it_is_tied(tmp_path):
    source = changed_copy(tmp_path, "gqa", lambda held: held.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"lm_head.weight is missing, \[40, 32\]"):
        import_model(source, tmp_path / "out", partition_on(MESHES["gqa"]))


@pytest.mark.parametrize("way", ["import", "export"])
def test_outputs_that_hold_something_are_left_as_they_are(
    workdirs, tmp_path, way, capsys
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("kept")
    source = hf_llama.DIRECTORY / "mha" if way == "import" else workdirs["mha"]
    assert main([way, str(source), str(out)]) == 1
    assert f"{out} already exists and is left as it is" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["precious"]


def test_the_tokenizer_of_the_original_comes_along(workdirs, tmp_path):
    original = tmp_path / "original"
    original.mkdir()
    for name in ("tokenizer.json", "tokenizer.model", "notes.txt"):
        (original / name).write_text(name)
    (original / "tokenizer").mkdir()
    config = {"max_position_embeddings": 77, "eos_token_id": 5}
    (original / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    arguments = ["export", str(workdirs["mha"]), str(out), "--like", str(original)]
    arguments.append("--file-gigabytes=inf")  # in one file
    assert main(arguments) == 0
    names = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"}
    assert {path.name for path in out.iterdir()} == names
    assert (out / "tokenizer.model").read_text() == "tokenizer.model"
    written = json.loads((out / "config.json").read_text())
    assert {name: written[name] for name in config} == config
    assert written["hidden_size"] == 32


def test_an_export_that_fails_leaves_nothing(workdirs, tmp_path, monkeypatch):
    calls = []

    def failing(tensors: dict, path: Path, metadata: dict) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError("disk full")
        save_file(tensors, path, metadata)

    monkeypatch.setattr("tools.lib.hf.tensor_files.save_file", failing)
    with pytest.raises(OSError, match="disk full"):
        export_model(
            str(workdirs["mha"]),
            tmp_path / "out",
            partition_on(MeshShape(fsdp=8)),
            dtype="float32",
            file_bytes=20_000,
        )
    assert list(tmp_path.iterdir()) == []


def test_program_imports_and_exports_from_the_root(tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tools.convert_hf", *arguments],
            cwd=Path(convert_hf.__file__).parents[1],
            capture_output=True,
            text=True,
        )

    source, workdir = hf_llama.DIRECTORY / "mha", tmp_path / "workdir"
    done = run("import", str(source), str(workdir))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"--config.init_from={workdir}" in done.stdout
    assert "--config.model.norm_epsilon=1e-05" in done.stdout
    done = run("export", str(workdir), str(tmp_path / "out"))
    assert (done.returncode, done.stderr) == (0, "")
    before, after = tensors(source), tensors(tmp_path / "out")
    for key, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[key])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
