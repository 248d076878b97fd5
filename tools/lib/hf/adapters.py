"""Adapters as PEFT has them: adapter_config.json, names and layout of their tensors.

There A is (rank, inputs) and B (outputs, rank), all heads in one axis, for each layer.
All experts of a layer are one parameter (`target_parameters`), whose A is (X · rank,
inputs) and B (outputs, rank · X), and gate and up together are one, with one A. As
transformers 4 had experts, each has modules of its own.
"""

import copy
import dataclasses
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from data.json_text import short
from models.abstract import Model
from models.lora import TARGETS, Lora
from models.sizes import LanguageModelConfig
from tasks.state import abstract_parameters, identity
from tasks.text import TextRun
from tools.lib.hf.config import WITH_IMAGES, fused
from tools.lib.hf.fields import FUSED
from tools.lib.hf.names import EXPERTS, LAYER, Weight, weight_at
from training.saved.stored_step import differences, leaves, listed
from training.saved.weights import SavedParameters

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = {"a": ".lora_A.weight", "b": ".lora_B.weight"}

READ = ("peft_type", "r", "lora_alpha", "target_modules", "use_rslora")
READ += ("target_parameters", "peft_version")
GATE_UP = "gate_up_proj"
DOWN = "down_proj"
WHOLES = {"gate": GATE_UP, "up": GATE_UP, "down": DOWN}
"""Parameters of all experts of a layer that hold our matrices, by their last names."""
BY_EXPERT = "olmoe", "qwen3_moe"
"""Families of whose experts PEFT also reads adapters with modules of their own."""
OLDEST = 0, 19, 1
"""Version of PEFT from which on A of a parameter is of its inputs in every model."""
HARMLESS = frozenset(
    # What it is, and of which model; which matrices it was to have: the tensors count.
    ("task_type", "base_model_name_or_path", "revision", "auto_mapping")
    + ("inference_mode", "layers_pattern", "exclude_modules", "runtime_config")
    # Of training, and of variants that are off where their switch is.
    + ("lora_dropout", "megatron_core", "qalora_group_size", "ensure_weight_tying")
)
"""Fields of adapter_config.json that change no logits."""
NOTHING = (None, False, "none", {}, [])
INITIAL = (True, False, None, "gaussian", "orthogonal")
"""`init_lora_weights` that leave the weights of the model as they are."""


def last_names(names: Any) -> list[str]:
    """Returns the last parts of dotted names, in a list or object of JSON, if it is."""
    names = names if isinstance(names, (list, Mapping)) else ()
    return [str(name).rpartition(".")[2] for name in names]


def weights_of(model: Model, fields: Mapping[str, Any]) -> tuple[Weight, ...]:
    """Returns where PEFT keeps each factor of a model's adapters.

    fields: of adapter_config.json.
    """
    weights = []
    parameters = last_names(fields.get("target_parameters"))
    shapes = traverse_util.flatten_dict(model.shapes)
    for *module, factor in shapes:
        name, _, end = factor.rpartition("_")
        has_experts = module[1] == "feed_forward" and module[0] != "dense_layers"
        experts = model.config.experts if has_experts else 0
        if experts and parameters:
            path = (*module, factor)
            outputs = shapes[path].shape[-1]
            weights.append(_of_all_experts(model, path, outputs, parameters))
            continue
        if experts:  # whose factors are (inputs, rank) and (rank, outputs)
            stored = LAYER + EXPERTS["by_expert"][name].name
        else:
            stored = weight_at((*module, name)).name
        weight = Weight(
            path=(*module, factor),
            name=f"{PREFIX}{stored.removesuffix('.weight')}{ENDS[end]}",
            input_axes=1,
            is_turned=end == "b" or experts > 0,
            numbers=tuple(model.config.numbers(module[0])),
            experts=experts,
        )
        weights.append(weight)
    return tuple(weights)


def _of_all_experts(
    model: Model, path: tuple[str, ...], outputs: int, parameters: Collection[str]
) -> Weight:
    """Returns where a factor of all experts of a layer is kept, as one parameter's.

    outputs: its last axis. parameters: those that have adapters, by their last names.
    """
    name, _, end = path[-1].rpartition("_")
    # Of two wrappers of one module that of `down` is the outer one.
    is_inner = name != "down" and DOWN in parameters
    module = f"{PREFIX}{LAYER}mlp.experts" + ".base_layer" * is_inner
    form = "gpt_oss" if model.config.activation == "clamped" else "whole"
    spacing = EXPERTS[form][name].spacing if end == "b" else 1
    behind_gate = outputs if spacing == 1 else 1
    return Weight(
        path=path,
        name=f"{module}{ENDS[end]}",
        input_axes=2,
        is_turned=end == "b",
        first=behind_gate if path[-1] == "up_b" else 0,
        numbers=tuple(model.config.numbers(path[0])),
        spacing=spacing,
        # (X, rank, inputs) and (rank, X, outputs).
        order=(0, 2, 1) if end == "a" else (1, 0, 2),
    )


def config_fields(lora: Lora, base: str | None, is_whole: bool) -> dict[str, Any]:
    """Returns adapter_config.json; base: name or path of the model, if it is known.

    is_whole: whether the adapters of all experts of a layer are one parameter's.
    """
    targets = lora.targets.split(",")
    of_parameters: dict[str, Any] = {}
    if is_whole:
        wholes = dict.fromkeys(WHOLES[name] for name in targets if name in WHOLES)
        targets = [name for name in targets if name not in WHOLES]
        of_parameters["target_parameters"] = [f"mlp.experts.{name}" for name in wholes]
    if lora.gate_up_rank not in (0, lora.rank):
        of_parameters["rank_pattern"] = {GATE_UP: lora.gate_up_rank}
        of_parameters["alpha_pattern"] = {GATE_UP: lora.scale * lora.gate_up_rank}
    modules = [f"{name}_proj" for name in targets]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        **of_parameters,
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
    parameters = last_names(fields.get("target_parameters"))
    gate_up = _of_gate_up(fields) if GATE_UP in parameters else {}
    shared_rank = gate_up.get("rank_pattern", rank)
    shared_alpha = gate_up.get("alpha_pattern", alpha)
    wrong = _wrong_parameters(fields) if parameters else []
    for name, value in fields.items():
        is_known = name in HARMLESS or name in READ or name in gate_up
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
        shared_alpha *= max(shared_rank, 1) ** 0.5
    if not math.isclose(shared_alpha * rank, alpha * shared_rank):
        raise ValueError(
            f"{CONFIG} must have one alpha / rank for all, got {alpha} / {rank} and "
            f"{shared_alpha} / {shared_rank} of {GATE_UP}: merge it with PEFT, and "
            "import the model"
        )
    targets = []
    for target in TARGETS:
        if f"{target}_proj" in modules or WHOLES.get(target) in parameters:
            targets.append(target)
    if GATE_UP not in parameters:
        shared_rank = 0
    return Lora(rank, float(alpha), ",".join(targets), shared_rank)


def _of_gate_up(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that give gate and up a rank or alpha of their own."""
    own = {}
    for name, types in (("rank_pattern", (int,)), ("alpha_pattern", (int, float))):
        pattern = fields.get(name)
        if last_names(pattern) == [GATE_UP]:
            (value,) = pattern.values()
            if type(value) in types:
                own[name] = value
    return own


def _wrong_parameters(fields: Mapping[str, Any]) -> list[str]:
    """Returns a complaint for each thing that adapters of parameters have wrong."""
    wrong = []
    if not {GATE_UP, DOWN}.issuperset(last_names(fields["target_parameters"])):
        wrong.append(
            f"target_parameters={short(fields['target_parameters'])}, of which only "
            f"{GATE_UP} and {DOWN} can be read"
        )
    version = re.match(r"(\d+)\.(\d+)\.(\d+)", str(fields.get("peft_version")))
    if version and tuple(map(int, version.groups())) < OLDEST:
        wrong.append(
            f"peft_version={version[0]}, where A and B of parameters were exchanged "
            "(merge them with it, and import the model)"
        )
    return wrong


@dataclasses.dataclass
class Alone:
    """Adapters as PEFT's files have them.

    model: whose parameters they are. parameters: they themselves, in memory.
    is_whole: whether those of all experts of a layer are one parameter's.
    """

    model: Model
    parameters: Any
    is_whole: bool

    def config_fields(self, base: str | None) -> dict[str, Any]:
        """Returns adapter_config.json; base: as of the function."""
        return config_fields(self.model.config.lora, base, self.is_whole)

    def restore(self, abstract: Any) -> Any:
        """Returns those of `abstract`; as of `SavedParameters`."""
        own = traverse_util.flatten_dict(self.parameters)
        paths = traverse_util.flatten_dict(abstract)
        return traverse_util.unflatten_dict({path: own[path] for path in paths})


class Adapted:
    """The newest adapters of a run, and the parameters that they belong to.

    run: theirs. model: the run's. parameters: the adapters.
    """

    def __init__(self, run: TextRun):
        """Reads the adapters of a run.

        Raises:
          ValueError, FileNotFoundError: the run has no adapters, or the weights that
            they belong to are missing or changed.
        """
        self.run = run
        self.model = model = run.model
        saved = SavedParameters(run.config.workdir)
        saved.check_model(run.fingerprint)
        like = abstract_parameters(model.shapes, model.axes, run.partition)
        self.parameters = saved.restore(like)
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
        if kind in WITH_IMAGES or (original and fused(original)):
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

    def alone(self, original: Mapping[str, Any]) -> Alone:
        """Returns the adapters as PEFT has them; original: as of `check_alone`.

        Raises:
          ValueError: only one of gate and up has adapters, which are one parameter.
        """
        lora = self.model.config.lora
        adapted = WHOLES.keys() & lora.matrices if self.model.config.experts else set()
        has_modules = original.get("model_type") in BY_EXPERT and not lora.gate_up_rank
        if has_modules or not adapted:
            return Alone(self.model, self.parameters, is_whole=False)
        if lora.gate_up_rank or adapted == {"down"}:
            return Alone(self.model, self.parameters, is_whole=True)
        if not {"gate", "up"} <= adapted:
            raise ValueError(
                f"lora.targets={lora.targets!r} must have both gate and up, which are "
                "one parameter there: export it merged, without --adapter"
            )
        settings = copy.deepcopy(self.run.config)
        settings.lora.gate_up_rank = 2 * lora.rank
        model = TextRun(settings, self.run.partition).model
        return Alone(model, _in_blocks(self.parameters), is_whole=True)

    def restore(self, abstract: Any) -> Any:
        """Reads parameters with their adapters added in; as of `SavedParameters`.

        The frozen ones are as they were imported.
        """
        base = traverse_util.flatten_dict(self._base.restore(abstract))
        own = traverse_util.flatten_dict(self.parameters)
        for path, weight in base.items():
            *module, name = path
            b = own.get((*module, f"{name}_b"))
            if b is None:
                continue
            # Up may share that of gate.
            a = own.get((*module, f"{name}_a"), own.get((*module, "gate_a")))
            if weight.ndim == 4 and "feed_forward" in path:  # of experts
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


def _in_blocks(parameters: Any) -> Any:
    """Returns adapters of experts with one A of gate and up, of twice the rank.

    It is both of theirs, and B of each has zeros for that of the other.
    """
    own = traverse_util.flatten_dict(jax.device_get(parameters))
    for path in [path for path in own if path[-1] == "gate_a"]:
        *module, _ = path
        own[path] = np.concatenate([own[path], own.pop((*module, "up_a"))], -1)
        rank = own[path].shape[-1] // 2
        for name, around in (("gate_b", (0, rank)), ("up_b", (rank, 0))):
            b = own[*module, name]  # (layers, X, rank, outputs)
            own[*module, name] = np.pad(b, [(0, 0), (0, 0), around, (0, 0)])
    return traverse_util.unflatten_dict(own)
