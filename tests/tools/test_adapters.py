"""Adapters against PEFT's: in and out, logits, losses of training, and faults named."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data.batch import Batch
from kernels.layouts import permute
from models.lora import Lora
from tasks import run_config
from tasks.generation import restored_parameters
from tasks.programs import read_frozen
from tasks.systems import attention_system
from tasks.text import TextRun
from tests.cases import in_tiers, pairs, table
from tests.models.test_memory import products
from tests.small.models import assert_same, partition_of
from tests.tools import hf_models
from tools.convert_hf import export_model, import_model, main
from tools.lib.hf import adapters
from tools.lib.hf.reading import load
from training.sharding.mesh import MeshShape, Partition
from training.step import initial_state

slow = pytest.mark.slow
DIRECTORY = Path(__file__).parents[1] / "fixtures" / "peft_adapters"
RING, CUBE = MeshShape(ring=4), MeshShape(fsdp=2, ring=2, tensor=2)
SHAPES = {"llama_scaled": RING, "gemma3": CUBE}
NAMES = sorted(path.name for path in DIRECTORY.iterdir())
FILE = {"dtype": "float32"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Workdirs NAME of models, and NAME.peft of their adapters."""
    return tmp_path_factory.mktemp("runs")


def run_of(runs: Path, name: str) -> tuple[Any, Partition]:
    """Config of the imported adapter, and a mesh."""
    shape = SHAPES.get(name, MeshShape(fsdp=2, ring=4))
    partition = partition_of(shape)
    if not (runs / name).exists():
        import_model(hf_models.DIRECTORY / name, runs / name, partition)
        adapter = DIRECTORY / name, runs / f"{name}.peft", partition
        import_model(*adapter, weights=runs / name)
    config = run_config.read(str(runs / f"{name}.peft"))
    mesh = {f"mesh.{axis}": size for axis, size in shape.axes.items()}
    wide = {"compute_dtype": "float32", "lora.base_dtype": "float32"}
    wide |= {"implementation": "reference", "stripe_granule": 3}
    config.update_from_flattened_dict(mesh | wide)
    run_config.write(config)
    return config, partition


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[slow] * (n != "gemma3")) for n in NAMES]
)
def test_logits_are_pefts(runs, name):
    config, partition = run_of(runs, name)
    tokens, plain = hf_models.expected(name)
    wanted = np.load(DIRECTORY / name / "expected.npz")["logits"]
    assert np.abs(wanted - plain).max() > 0.1
    parameters, step = restored_parameters(TextRun(config, partition))
    got = hf_models.logits(config, partition)(parameters, tokens)
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    assert step == 0


@pytest.mark.thorough
def test_a_merged_export_is_the_model_and_the_products_of_its_adapters(runs, tmp_path):
    """Whatever type the run holds the model in; a line says that it rounds."""
    config, partition = run_of(runs, "llama_scaled")
    plain = load_file(hf_models.DIRECTORY / "llama_scaled" / "model.safetensors")
    factors = load_file(DIRECTORY / "llama_scaled" / adapters.TENSORS)
    for compute, rounded in (("bfloat16", True), ("float32", False)):
        config.update({"compute_dtype": compute, "lora": {"base_dtype": ""}})
        said = []
        read_frozen(TextRun(config, partition), said.append)
        assert (" matrices rounded to bfloat16 (" in said[0]) == rounded
        run_config.write(config)
        export_model(config.workdir, tmp_path / compute, partition, **FILE)
        found = load_file(tmp_path / compute / "model.safetensors")
        assert found.keys() == plain.keys()
        for name, tensor in found.items():
            wanted = plain[name].astype(np.float32)
            module = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{module}A.weight" in factors:
                a, b = (factors[f"{module}{factor}.weight"] for factor in "AB")
                wanted = wanted + config.lora.alpha / config.lora.rank * b @ a
                np.testing.assert_allclose(tensor, wanted, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(tensor, wanted, name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama_scaled", "qwen3_moe", "gpt_oss"])
def test_an_exported_adapter_is_the_one_that_was_imported(runs, tmp_path, name):
    config, partition = run_of(runs, name)
    like = {"original": hf_models.DIRECTORY / name, "adapter_only": True}
    export_model(config.workdir, tmp_path / "peft", partition, **FILE, **like)
    wanted = load_file(DIRECTORY / name / adapters.TENSORS)
    found = load_file(tmp_path / "peft" / adapters.TENSORS)
    assert found.keys() == wanted.keys()
    for tensor in wanted:
        assert found[tensor].dtype == wanted[tensor].dtype == np.float32
        np.testing.assert_array_equal(found[tensor], wanted[tensor], tensor)
    fields, theirs = (
        json.loads((folder / adapters.CONFIG).read_text())
        for folder in (tmp_path / "peft", DIRECTORY / name)
    )
    wholes = adapters.last_names(fields.pop("target_parameters", None))
    assert wholes == sorted(adapters.last_names(theirs["target_parameters"]))[::-1]
    for pattern in ("rank_pattern", "alpha_pattern"):
        own = {f"experts.{last}": x for last, x in fields.pop(pattern, {}).items()}
        assert own == theirs[pattern]
    assert {*fields.pop("target_modules")} == {*theirs["target_modules"]}
    assert fields.pop("base_model_name_or_path") == str(like["original"])
    assert fields.items() <= theirs.items()


@pytest.mark.thorough
def test_a_model_that_adapters_do_not_belong_to_is_refused(runs, tmp_path):
    config, partition = run_of(runs, "llama_scaled")
    changed = tmp_path / "changed"
    shutil.copytree(hf_models.DIRECTORY / "llama_scaled", changed)
    (file,) = changed.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] = 2 * tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    import_model(changed, tmp_path / "other", partition)
    out, other = tmp_path / "out", str(tmp_path / "other")
    with pytest.raises(ValueError, match="base_weights: saved step 0 with digest"):
        export_model(config.workdir, out, partition, weights=other, **FILE)
    assert not out.exists()
    # Where the right one has moved it is found.
    moved = str(runs / "llama_scaled")
    export_model(config.workdir, out, partition, weights=moved, **FILE)


def test_what_pefts_files_would_not_say_is_exported_merged_only(runs, tmp_path):
    config, partition = run_of(runs, "llama_scaled")
    adapted = adapters.Adapted(TextRun(config, partition))
    scaling = dataclasses.replace(adapted.model.config.rope_scaling, factor=4.0)
    changed = dataclasses.replace(adapted.model.config, rope_scaling=scaling)
    said = r"\(rope_scaling.factor: saved 8.0, this run 4.0\): export it merged, wi"
    with pytest.raises(ValueError, match=said):
        adapted.check_alone(changed, {})
    images = {"model_type": "gemma3", "text_config": hf_models.fields("gemma3")}
    options = FILE | {"original": tmp_path, "adapter_only": True}
    for like in images, hf_models.fields("phi3"):
        (tmp_path / "config.json").write_text(json.dumps(like))
        said = f"{like['model_type']}' have other names .*: export it merged, wit"
        with pytest.raises(ValueError, match=said):
            export_model(config.workdir, tmp_path / "out", partition, **options)
    assert not (tmp_path / "out").exists()


def test_layers_that_are_all_may_be_listed_and_fused_matrices_are_refused():
    fields = json.loads((DIRECTORY / "olmo2" / adapters.CONFIG).read_text())
    names = [*load_file(DIRECTORY / "olmo2" / adapters.TENSORS)]
    lora = adapters.read_lora(fields, names, 2)
    listed = fields | {"layers_to_transform": [0, 1]}
    assert adapters.read_lora(listed, names, 2) == lora
    fused = [name.replace("gate_proj", "gate_up_proj") for name in names]
    with pytest.raises(ValueError, match="adapters of gate_up_proj, of which models"):
        adapters.read_lora(fields, fused, 2)


def test_scales_of_parameters_are_by_their_own_rank():
    """alpha / rank, or by RsLoRA alpha / sqrt(rank), which is one for all here."""
    fields = json.loads((DIRECTORY / "gpt_oss" / adapters.CONFIG).read_text())
    names = [*load_file(DIRECTORY / "gpt_oss" / adapters.TENSORS)]
    wanted = Lora(4, 6.0, "q,v,gate,up,down", 6)
    assert adapters.read_lora(fields, names, 2) == wanted
    pattern = {".*\\.gate_up_proj": 3 * 6**0.5}
    fields |= {"use_rslora": True, "alpha_pattern": pattern}
    wanted = dataclasses.replace(wanted, alpha=12.0)
    assert adapters.read_lora(fields, names, 2) == wanted


@pytest.mark.parametrize(("changes", "said"), pairs("adapter_configs.txt"))
def test_an_adapter_that_cannot_be_read_is_refused(runs, tmp_path, changes, said):
    _, partition = run_of(runs, "llama_scaled")
    copy = shutil.copytree(DIRECTORY / "llama_scaled", tmp_path / "copy")
    fields = json.loads((copy / adapters.CONFIG).read_text())
    (copy / adapters.CONFIG).write_text(json.dumps(fields | json.loads(changes)))
    with pytest.raises(ValueError, match=re.escape(said)):
        import_model(copy, tmp_path / "new", partition, runs / "llama_scaled")
    assert not (tmp_path / "new").exists()


def test_wrong_commands_say_what_to_do(runs, tmp_path, capsys):
    run_of(runs, "llama_scaled")
    adapter, model = DIRECTORY / "llama_scaled", runs / "llama_scaled"
    new = f"{tmp_path}/a"
    for command, said in (
        (f"import {adapter} {new}", "holds an adapter: name the workdir"),
        (f"import {model} {new} --weights {model}", "adapter_config.json does"),
        (f"export {model} {new} --adapter", "holds no adapters: export it"),
        (f"import {adapter} {new} --weights {model}.peft", "holds adapters, and"),
    ):
        assert main(command.split()) == 1
        (error,) = capsys.readouterr().err.splitlines()
        assert said in error
    assert not [*tmp_path.iterdir()]


# Training.

SETTINGS = dict(table("runs.txt", "peft"))
"""Of tests/fixtures/make_peft_adapters.py."""


class Run:
    """A fixture's model with adapters of rank 4 on a mesh."""

    def __init__(self, name: str, shape: MeshShape, **overrides: Any):
        mesh = {f"mesh__{axis}": size for axis, size in shape.axes.items()}
        self.config = hf_models.run_config(name, **SETTINGS | mesh | overrides)
        self.partition = partition_of(shape)
        self.run = TextRun(self.config, self.partition)
        self.model = self.run.model
        plain = TextRun(hf_models.run_config(name), self.partition).model
        weights = hf_models.loaded(name, plain, self.partition)
        like = self.model.frozen_shapes
        self.frozen = jax.tree.map(lambda x, y: x.astype(y.dtype), weights, like)

    def train(self, parameters: Any, batches: np.ndarray) -> tuple[list[float], Any]:
        """Losses of a step for each batch of tokens (B, T), and the last adapters."""
        like, optimizer = self.run.state_like, self.run.optimizer
        step, losses = self.run.train_step(), []
        placing = jax.tree.map(lambda leaf: leaf.sharding, like)
        state = jax.device_put(initial_state(parameters, optimizer), placing)
        for tokens in batches:
            state, metrics = step(state, self.batch(tokens), self.frozen)
            losses.append(float(metrics["loss"]))
        return losses, jax.device_get(state.params)

    def batch(self, tokens: np.ndarray) -> Batch:
        """Rows (B, T), whose tokens predict the next; in order, on the mesh."""
        index = np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
        weights = (index < index.shape[1] - 1).astype(np.float32)
        targets = np.roll(tokens, -1, axis=1)
        rows = Batch(tokens, targets, weights, index, np.zeros_like(index), index + 1)
        layout = attention_system(self.config).layout
        ordered = (permute(x, layout, self.partition.ring_size) for x in rows)
        sharding = self.partition.sharding(("batch", "sequence"), tokens.shape)
        return jax.device_put(Batch(*ordered), sharding)


def adapters_of(name: str, when: str, run: Run) -> Any:
    """PEFT's, before or after training."""
    found = np.load(DIRECTORY / name / "training.npz").items()
    tensors = {n.removeprefix(f"{when}."): x for n, x in found if n.startswith(when)}
    files = SimpleNamespace(read=lambda name, index: tensors[name][index])
    files.shapes = {name: tensor.shape for name, tensor in tensors.items()}
    fields = json.loads((DIRECTORY / name / adapters.CONFIG).read_text())
    weights = adapters.weights_of(run.model, fields)
    return load(files, weights, run.model, run.partition)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, shape, fields", in_tiers("runs.txt", "as-peft", CUBE=CUBE, RING=RING)
)
def test_losses_and_adapters_of_training_are_pefts(name, shape, fields):
    run = Run(name, shape, **fields)
    wanted = np.load(DIRECTORY / name / "training.npz")
    start = adapters_of(name, "initial", run)
    losses, last = run.train(start, wanted["tokens"])
    np.testing.assert_allclose(losses, wanted["losses"], rtol=1e-5)
    assert_same(last, jax.device_get(adapters_of(name, "final", run)), 1e-4)


@pytest.mark.thorough
def test_an_adapter_adds_only_its_own_products():
    lora = {"lora__rank": 3, "lora__alpha": 3.0, "lora__base_dtype": "float32"}
    # Of each of 7 matrices and of the head the gradient is not there. An adapter has 2
    # products, and two of each in the backward.
    more = 7 * (2 + 4) - 7 - 1
    assert products("everything", **lora) == products("everything") + more
    # The second is not kept beside that of the matrix; a layer's last is not needed.
    assert products("products", **lora) == products("products") + more + 6


def adapters_of_each_expert(
    folder: Path, matrices: dict[str, tuple[int, int]], experts: int
) -> dict[str, np.ndarray]:
    """Writes PEFT's adapters of rank 2 with modules of each expert, in two layers.

    matrices: inputs and outputs of those that have one.
    """
    rng = np.random.default_rng(6)
    factors = {}
    for layer, expert, matrix in np.ndindex(2, experts, len(matrices)):
        name, (inputs, outputs) = [*matrices.items()][matrix]
        module = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        for end, shape in (("A", (2, inputs)), ("B", (outputs, 2))):
            factor = rng.normal(size=shape).astype(np.float32)
            factors[f"base_model.model.{module}.lora_{end}.weight"] = factor
    folder.mkdir()
    save_file(factors, folder / adapters.TENSORS)
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    (folder / adapters.CONFIG).write_text(json.dumps(fields))
    return factors


@pytest.mark.thorough
def test_adapters_of_experts_are_merged_and_named(tmp_path):
    """Each expert's by its own number, in and out; the merged model has their sums."""
    name = "qwen3_moe"
    held = load_file(hf_models.DIRECTORY / name / "model.safetensors")
    source = tmp_path / "source"
    matrices = {"gate": (32, 12), "down": (12, 32)}
    factors = adapters_of_each_expert(source, matrices, experts=8)
    partition = partition_of(CUBE)
    weights, workdir = tmp_path / "weights", tmp_path / "adapted"
    import_model(hf_models.DIRECTORY / name, weights, partition)
    import_model(source, workdir, partition, weights=weights)
    like = {"original": hf_models.DIRECTORY / name, **FILE}
    export_model(str(workdir), tmp_path / "peft", partition, adapter_only=True, **like)
    found = load_file(tmp_path / "peft" / adapters.TENSORS)
    assert found.keys() == factors.keys()
    for tensor, wanted in factors.items():
        np.testing.assert_array_equal(found[tensor], wanted, tensor)
    export_model(str(workdir), tmp_path / "merged", partition, **like)
    for tensor, got in load_file(tmp_path / "merged" / "model.safetensors").items():
        wanted = held[tensor].astype(np.float32)
        module = f"base_model.model.{tensor.removesuffix('.weight')}.lora_"
        if f"{module}A.weight" in factors:
            a, b = (factors[f"{module}{factor}.weight"] for factor in "AB")
            wanted = wanted + 3 * b @ a
        np.testing.assert_allclose(got, wanted, atol=1e-5, err_msg=tensor)
    adapted = adapters.Adapted(TextRun(run_config.read(str(workdir)), partition))
    with pytest.raises(ValueError, match="targets='gate,down' must have both gate and"):
        adapted.alone({"model_type": "mixtral"})


@pytest.mark.thorough
@pytest.mark.parametrize("shared", [4, 0])
def test_gates_with_an_a_of_their_own_are_blocks_of_one_adapter(tmp_path, shared):
    """Where PEFT has one adapter of all experts; merged they are the same model.

    shared: rank of the blocks; 0: only `down` has adapters.
    """
    name = "gpt_oss"
    source, like = tmp_path / "source", {"original": hf_models.DIRECTORY / name, **FILE}
    matrices = {"down": (24, 32)}
    matrices |= dict.fromkeys(("gate", "up"), (32, 24)) if shared else {}
    adapters_of_each_expert(source, matrices, experts=4)
    partition = partition_of(CUBE)
    weights, merged = tmp_path / "weights", []
    import_model(hf_models.DIRECTORY / name, weights, partition)
    for number in range(2):
        workdir, out = str(tmp_path / f"run{number}"), tmp_path / f"merged{number}"
        import_model(source, Path(workdir), partition, weights=weights)
        export_model(workdir, out, partition, **like)
        merged.append(load_file(out / "model.safetensors"))
        source = tmp_path / f"peft{number}"
        export_model(workdir, source, partition, adapter_only=True, **like)
    fields = json.loads((source / adapters.CONFIG).read_text())
    assert fields["target_modules"] == [] and fields["r"] == 2
    ranks = {"gate_up_proj": 4} if shared else None
    alphas = {"gate_up_proj": 12} if shared else None
    assert fields.get("rank_pattern") == ranks
    assert fields.get("alpha_pattern") == alphas
    assert run_config.read(workdir).lora.gate_up_rank == shared
    plain = load_file(hf_models.DIRECTORY / name / "model.safetensors")
    for tensor, wanted in merged[0].items():
        np.testing.assert_allclose(merged[1][tensor], wanted, atol=1e-5, err_msg=tensor)
        is_adapted = tensor.endswith("down_proj")
        is_adapted |= tensor.endswith("gate_up_proj") and shared > 0
        changes = np.abs(wanted - plain[tensor].astype(np.float32)).max()
        assert (changes > 1) == is_adapted
