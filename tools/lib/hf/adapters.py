"""Adapters as PEFT has them: adapter_config.json, names and layout of their tensors.

There A is (rank, inputs) and B (outputs, rank), all heads in one axis, for each layer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from data.json_text import short
from models.abstract import Model
from models.lora import TARGETS, Lora
from models.sizes import LanguageModelConfig
from tasks.state import abstract_parameters, identity
from tasks.text import TextRun
from tools.lib.hf.config import WITH_IMAGES, experts_form, fused
from tools.lib.hf.fields import FUSED
from tools.lib.hf.names import EXPERTS, LAYER, Weight, weight_at
from training.saved.stored_step import differences, leaves, listed
from training.saved.weights import SavedParameters

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = {"a": ".lora_A.weight", "b": ".lora_B.weight"}

READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora")
HARMLESS = frozenset(
    # What it is, and of which model; which matrices it was to have: the tensors count.
    ("task_type", "base_model_name_or_path", "revision", "peft_version", "auto_mapping")
    + ("inference_mode", "layers_pattern", "exclude_modules", "runtime_config")
    # Of training, and of variants that are off where their switch is.
    + ("lora_dropout", "megatron_core", "qalora_group_size", "ensure_weight_tying")
)
"""Fields of adapter_config.json that change no logits."""
NOTHING = (None, False, "none", {}, [])
INITIAL = (True, False, None, "gaussian", "orthogonal")
"""`init_lora_weights` that leave the weights of the model as they are."""


def weights_of(model: Model) -> tuple[Weight, ...]:
    """Returns where PEFT keeps each factor of a model's adapters."""
    weights = []
    for *module, factor in traverse_util.flatten_dict(model.shapes):
        name, _, end = factor.rpartition("_")
        experts = model.config.experts if module[1] == "feed_forward" else 0
        if experts:  # whose factors are (inputs, rank) and (rank, outputs)
            stored = LAYER + EXPERTS["by_expert"][name].name
        else:
            stored = weight_at((*module, name)).name
        weight = Weight(
            path=(*module, factor),
            name=f"{PREFIX}{stored.removesuffix('.weight')}{ENDS[end]}",
            input_axes=1,
            is_turned=end == "b" or experts > 0,
            numbers=tuple(model.config.numbers(module[0] == "delta_layers")),
            experts=experts,
        )
        weights.append(weight)
    return tuple(weights)


def config_fields(lora: Lora, base: str | None) -> dict[str, Any]:
    """Returns adapter_config.json; base: name or path of the model, if it is known."""
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


def read_lora(fields: Mapping[str, Any], names: list[str], layers: int) -> Lora:
    """Returns the adapters that adapter_config.json describes.

    names: of the tensors, which say what has an adapter. layers: of the model.

    Raises:
      ValueError: they are not LoRA's, or have what adapters here lack.
    """
    rank = fields.get("r")
    alpha = fields.get("lora_alpha")
    numbers = (int, float)
    modules = {module for name in names for module in name.split(".")[1:-1]}
    wrong = []
    for name, value in fields.items():
        is_known = name in HARMLESS or name in READ
        is_all = name == "layers_to_transform" and value == [*range(layers)]
        harmless = INITIAL if name == "init_lora_weights" else NOTHING
        if not (is_known or is_all) and value not in harmless:
            wrong.append(f"{name}={short(value)}")
    for whole in sorted(FUSED.keys() & modules):
        wrong.append(f"adapters of {whole}, of which models here have the parts")
    if fields.get("peft_type") != "LORA":
        wrong.insert(0, f"peft_type={short(fields.get('peft_type'))}")
    if type(rank) is not int or type(alpha) not in numbers:
        wrong.append(f"r={short(rank)} lora_alpha={short(alpha)}")
    if wrong:
        raise ValueError(
            f"{CONFIG} describes no adapter that can be read: {'; '.join(wrong)}"
        )
    if fields.get("use_rslora"):
        alpha *= max(rank, 1) ** 0.5
    targets = [target for target in TARGETS if f"{target}_proj" in modules]
    return Lora(rank, float(alpha), ",".join(targets))


class Adapted:
    """The newest adapters of a run, and the parameters that they belong to.

    saved: the adapters. parameters: they themselves. model: theirs.
    """

    def __init__(self, run: TextRun):
        """Reads the adapters of a run.

        Raises:
          ValueError, FileNotFoundError: the run has no adapters, or the weights that
            they belong to are missing or changed.
        """
        self.model = model = run.model
        self.saved = SavedParameters(run.config.workdir)
        self.saved.check_model(run.fingerprint)
        like = abstract_parameters(model.shapes, model.axes, run.partition)
        self.parameters = self.saved.restore(like)
        self._base = SavedParameters(run.config.init_from)

    def check_alone(
        self, config: LanguageModelConfig, original: Mapping[str, Any]
    ) -> None:
        """Refuses a model of which PEFT's files would not say all.

        config: of the model that the adapters make of their weights.
        original: config.json of the weights, if it is known.

        Raises:
          ValueError: it differs from that of the weights, or is one with images or
            with fused matrices.
        """
        kind = original.get("model_type")
        is_other = original and (fused(original) or self._has_other_experts(original))
        if kind in WITH_IMAGES or is_other:
            raise ValueError(
                f"layers of model_type={kind!r} have other names than the adapters': "
                "export it merged, without --adapter"
            )
        ours = identity(dataclasses.replace(config, lora=Lora()))
        changed = differences(leaves(self._base.fingerprint["model"]), leaves(ours))
        if changed:
            raise ValueError(
                "an adapter does not say how its model differs from the weights "
                f"({listed(changed, '; ')}): export it merged, without --adapter"
            )

    def _has_other_experts(self, original: Mapping[str, Any]) -> bool:
        """Returns whether adapters of experts are named otherwise than PEFT's here."""
        adapted = {"gate", "up", "down"}.intersection(self.model.config.lora.matrices)
        has_experts = self.model.config.experts > 0 and bool(adapted)
        return has_experts and experts_form(original) != "by_expert"

    def restore(self, abstract: Any) -> Any:
        """Reads parameters with their adapters added in; as of `SavedParameters`.

        The frozen ones are as they were imported.
        """
        base = traverse_util.flatten_dict(self._base.restore(abstract))
        own = traverse_util.flatten_dict(self.parameters)
        for path, weight in base.items():
            *module, name = path
            a = own.get((*module, f"{name}_a"))
            b = own.get((*module, f"{name}_b"))
            if a is None:
                continue
            if self.model.config.experts and "feed_forward" in path:
                a = a.swapaxes(2, 3)  # (layers, experts, rank, inputs)
                merge = jax.vmap(_merge, (1, 1, 1, None), 1)
            else:
                merge = _merge
            base[path] = merge(weight, a, b, self.model.config.lora.scale)
        return traverse_util.unflatten_dict(base)


@jax.jit
def _merge(weight: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """Returns layers of a weight, (layers, …), with their adapters added in."""
    a = a.reshape(a.shape[:2] + (-1,))  # (layers, rank, inputs)
    b = b.reshape(b.shape[:2] + (-1,))  # (layers, rank, outputs)
    update = jnp.einsum("lri,lro->lio", a, b, precision="highest")
    return weight + scale * update.reshape(weight.shape)
