"""Adapters as PEFT has them: names and layout of their tensors, adapter_config.json.

There A is (rank, inputs) and B (outputs, rank), all heads in one axis, for each layer.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax import traverse_util

from models.abstract import Model
from models.adapters import Lora
from tools.lib.hf.names import weight_at

PREFIX, ENDS = "base_model.model.", {"a": ".lora_A.weight", "b": ".lora_B.weight"}
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def tensor_names(model: Model) -> dict[str, tuple[tuple[str, ...], int]]:
    """Returns path and layer of the parameter that each tensor of PEFT's is part of."""
    found = {}
    for path in traverse_util.flatten_dict(model.shapes):
        name, _, end = path[-1].rpartition("_")
        weight = weight_at((*path[:-1], name))
        for layer, stored in enumerate(weight.names(model.config.num_layers)):
            module = stored.removesuffix(".weight")
            found[f"{PREFIX}{module}{ENDS[end]}"] = path, layer
    return found


def to_tensors(parameters: Any, model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Yields PEFT's tensors of a model's adapters."""
    flat = traverse_util.flatten_dict(parameters)
    for name, (path, layer) in tensor_names(model).items():
        factor = np.asarray(flat[path][layer])
        matrix = factor.reshape(len(factor), -1)
        yield name, np.ascontiguousarray(matrix.T if path[-1].endswith("b") else matrix)


def to_parameters(tensors: Mapping[str, np.ndarray], model: Model) -> Any:
    """Returns the model's adapters, float32, from PEFT's tensors."""
    shapes = traverse_util.flatten_dict(model.shapes)
    flat = {path: np.zeros(shape.shape, np.float32) for path, shape in shapes.items()}
    for name, (path, layer) in tensor_names(model).items():
        matrix = tensors[name].T if path[-1].endswith("b") else tensors[name]
        flat[path][layer] = matrix.reshape(flat[path][layer].shape)
    return traverse_util.unflatten_dict(flat)


def config_fields(lora: Lora, base: str) -> dict[str, Any]:
    """Returns adapter_config.json; base: name or path of the model."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [f"{name}_proj" for name in lora.targets.split(",")],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
