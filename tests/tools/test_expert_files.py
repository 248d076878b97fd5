"""Experts' tensors in other forms than exports have: all in one, and in MXFP4."""

import json
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from models.lora import Lora
from tasks import run_config
from tasks.text import TextRun
from tests.small.models import partition_of
from tests.tools import hf_models
from tests.tools.test_convert_hf import changed_copy, digest, tensors
from tools.convert_hf import export_model, import_model, main
from tools.lib.hf import adapters
from tools.lib.hf.config import model_config
from tools.lib.hf.names import stored_shapes
from training.sharding.mesh import MeshShape


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "layers"), [("qwen3_5_moe", (0, 1, 2)), ("glm4_moe", (1, 2))]
)
def test_experts_in_one_tensor_are_those_of_one_tensor_each(tmp_path, name, layers):
    """As Qwen3.5's files have them: gate and up together."""
    changes: dict[str, Any] = {}
    held = tensors(hf_models.DIRECTORY / name)
    experts = model_config(hf_models.fields(name)).experts
    for layer in layers:
        parts = {}
        for part in "gate", "up", "down":
            begin = f"model.layers.{layer}.mlp.experts"
            names = [f"{begin}.{n}.{part}_proj.weight" for n in range(experts)]
            parts[part] = np.stack([held[name] for name in names])
            changes |= dict.fromkeys(names)
        both = np.concatenate([parts["gate"], parts["up"]], axis=1)
        changes |= {f"{begin}.gate_up_proj": both, f"{begin}.down_proj": parts["down"]}
    source = changed_copy(tmp_path, name, changes)
    partition = partition_of(MeshShape(fsdp=4, ring=2))
    import_model(source, tmp_path / "out", partition)
    import_model(hf_models.DIRECTORY / name, tmp_path / "plain", partition)
    assert digest(tmp_path / "out") == digest(tmp_path / "plain")


@pytest.mark.thorough
def test_layers_that_draft_tokens_are_left_out_and_that_is_said(tmp_path, capsys):
    """GLM-4.5's files have one behind the last; layers behind that are unknown."""
    plain = tmp_path / "plain"
    import_model(hf_models.DIRECTORY / "glm4_moe", plain, partition_of(MeshShape()))
    drafts = {"model.layers.3.eh_proj.weight": np.ones((32, 64), np.float32)}
    source = changed_copy(tmp_path, "glm4_moe", drafts)
    assert main(["import", str(source), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "left out: 1 tensors of layers that draft tokens ahead" in said
    assert digest(tmp_path / "out") == digest(plain)
    source = changed_copy(plain, "glm4_moe", {"num_nextn_predict_layers": 0} | drafts)
    assert main(["import", str(source), str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert "model.layers.3.eh_proj.weight [32, 64] is not a tensor of this" in error


@pytest.mark.thorough
def test_adapters_of_first_layers_are_merged_as_those_of_dense_ones(tmp_path):
    partition = partition_of(MeshShape(fsdp=2))
    source = hf_models.DIRECTORY / "glm4_moe"
    plain, peft, out = (tmp_path / name for name in ("plain", "peft", "out"))
    import_model(source, plain, partition)
    config = run_config.read(str(plain))
    config.lora.rank = 2
    model = TextRun(config, partition).model
    rng = np.random.default_rng(6)
    fields = adapters.config_fields(Lora(2), None, is_whole=False)
    shapes = stored_shapes(adapters.weights_of(model, fields), model)
    factors = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    peft.mkdir()
    save_file(factors, peft / adapters.TENSORS)
    (peft / adapters.CONFIG).write_text(json.dumps(fields))
    import_model(peft, tmp_path / "adapted", partition, weights=plain)
    export_model(str(tmp_path / "adapted"), out, partition, dtype="float32")
    name = "model.layers.0.mlp.down_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{end}.weight"] for end in "AB")
    wanted = tensors(source)[f"{name}.weight"].astype(np.float32) + 8 * b @ a
    np.testing.assert_allclose(tensors(out)[f"{name}.weight"], wanted, atol=1e-5)


@pytest.mark.thorough
def test_of_mxfp4_every_number_is_read_and_that_is_said(tmp_path, capsys):
    """Numbers and scales as its standard lists them, on a mesh that cuts the blocks."""
    rng = np.random.default_rng(4)
    listed = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    changes: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
    plain: dict[str, Any] = {"intermediate_size": 32}
    for layer in range(2):
        begin = f"model.layers.{layer}.mlp.experts"
        for name, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
            bits = rng.integers(0, 16, (4, outputs, 1, 16, 2), np.uint8)
            scales = rng.integers(122, 130, (4, outputs, 1), np.uint8)
            changes[f"{begin}.{name}"] = None
            changes[f"{begin}.{name}_blocks"] = bits[..., 0] + 16 * bits[..., 1]
            changes[f"{begin}.{name}_scales"] = scales
            numbers = np.array(listed, np.float32)[bits].reshape(4, outputs, 32)
            numbers *= 2.0 ** (scales.astype(np.float32) - 127)
            plain[f"{begin}.{name}"] = np.ascontiguousarray(numbers.swapaxes(1, 2))
        for side in (changes, plain):
            side[f"{begin}.gate_up_proj_bias"] = np.ones((4, 64), np.float32)
    digests = []
    for fields in ({"intermediate_size": 32} | changes, plain):
        folder = tmp_path / str(len(digests))
        folder.mkdir()
        source = changed_copy(folder, "gpt_oss", fields)
        import_model(source, folder / "out", partition_of(MeshShape(fsdp=2, ring=4)))
        digests.append(digest(folder / "out"))
    assert digests[0] == digests[1]
    said = capsys.readouterr().out
    assert said.count("dequantised: 4 tensors of MXFP4, which are float32 now") == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "layers"), [("qwen3_5_moe", [0, 1, 2]), ("glm4_moe", [1, 2])]
)
def test_adapters_of_all_experts_are_of_the_layers_that_have_them(
    tmp_path, name, layers
):
    """Also where two stacks share out the layers, or first ones have no experts."""
    partition = partition_of(MeshShape(fsdp=2))
    import_model(hf_models.DIRECTORY / name, tmp_path / "plain", partition)
    config = run_config.read(str(tmp_path / "plain"))
    config.lora.update(rank=2, gate_up_rank=3, targets="gate,up,down")
    model = TextRun(config, partition).model
    fields = adapters.config_fields(model.config.lora, None, is_whole=True)
    of_layers: dict[str, list[int]] = {}
    for weight in adapters.weights_of(model, fields):
        if "experts" in weight.name:
            of_layers.setdefault(weight.path[-1], []).extend(weight.numbers)
    assert set(of_layers) == {"gate_a", "gate_b", "up_b", "down_a", "down_b"}
    assert all(sorted(numbers) == layers for numbers in of_layers.values())
