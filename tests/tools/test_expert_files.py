"""Experts' tensors in other forms than exports have: all in one, and in MXFP4."""

from typing import Any

import numpy as np
import pytest

from tests.small.models import partition_of
from tests.tools import hf_models
from tests.tools.test_convert_hf import changed_copy, digest, tensors
from tools.convert_hf import import_model
from training.sharding.mesh import MeshShape


@pytest.mark.thorough
def test_experts_in_one_tensor_are_those_of_one_tensor_each(tmp_path):
    """As Qwen3.5's files have them: gate and up together."""
    changes: dict[str, Any] = {}
    held = tensors(hf_models.DIRECTORY / "qwen3_5_moe")
    for layer in range(3):
        parts = {}
        for part in "gate", "up", "down":
            begin = f"model.layers.{layer}.mlp.experts"
            names = [f"{begin}.{expert}.{part}_proj.weight" for expert in range(6)]
            parts[part] = np.stack([held[name] for name in names])
            changes |= dict.fromkeys(names)
        both = np.concatenate([parts["gate"], parts["up"]], axis=1)
        changes |= {f"{begin}.gate_up_proj": both, f"{begin}.down_proj": parts["down"]}
    source = changed_copy(tmp_path, "qwen3_5_moe", changes)
    partition = partition_of(MeshShape(fsdp=4, ring=2))
    import_model(source, tmp_path / "out", partition)
    import_model(hf_models.DIRECTORY / "qwen3_5_moe", tmp_path / "plain", partition)
    assert digest(tmp_path / "out") == digest(tmp_path / "plain")


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
