"""Parameters under the names and in the layout of Hugging Face, of every family.

There a matrix is stored as (outputs, inputs), all heads in one axis, and every layer
has tensors of its own; here it is (inputs, outputs), heads apart, and layers stacked.
Heads' sizes are in one order on both sides, as both rotate the pairs (i, i + D/2) in
RoPE (Meta's own files hold the pairs (2i, 2i + 1), and are another format).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from flax import traverse_util

from models.abstract import Model

CONFIG, TENSORS = "config.json", "model.safetensors"
"""Files of a model; of several files with tensors there is an index."""

Shape = tuple[int, ...]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter of ours and the tensor, or the tensor of each layer, it is kept in.

    path: in the tree of parameters.
    name: of the tensor; "{layer}" stands for the layer's number.
    input_axes: how many of the leading axes are the inputs of a matrix; 0 for a vector,
      of one or more axes here.
    is_turned: whether the matrix is stored as (outputs, inputs).
    first: row of the tensor that it begins at, below those of other parameters.
    has_gap: whether an axis of 1 is between the outputs and inputs of the tensor.
    numbers: of the layers that have it.
    experts: of each of which there is a tensor, "{expert}" in its name; 0 otherwise.
    leading: axes before the inputs that the tensor has, too: 1 of all experts in one.
    spacing: outputs of the tensor from one of these to the next; others lie between.
    order: axes of the parameter in the order in which the tensor has them, if another.

    Shapes and indices below are those of one tensor.
    """

    path: tuple[str, ...]
    name: str
    input_axes: int = 0
    is_turned: bool = True
    first: int = 0
    has_gap: bool = False
    numbers: tuple[int, ...] = ()
    experts: int = 0
    leading: int = 0
    spacing: int = 1
    order: tuple[int, ...] = ()

    @property
    def is_stacked(self) -> bool:
        """Whether each layer has its own tensor; the parameter holds all layers."""
        return "{layer}" in self.name

    @property
    def stacked(self) -> int:
        """Leading axes of the parameter that count tensors: layers, and experts."""
        return self.is_stacked + (self.experts > 0)

    @property
    def names(self) -> list[str]:
        """Names of the tensors, in the order of the layers, and of their experts."""
        if not self.is_stacked:
            return [self.name]
        names = []
        for layer in self.numbers:
            for expert in range(max(1, self.experts)):
                names.append(self.name.format(layer=layer, expert=expert))
        return names

    @property
    def along(self) -> int:
        """Returns the axis of the tensor along which it holds other parameters too."""
        return self.leading if self.spacing == 1 or self.is_turned else -1

    def stored_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the tensor's part, from that of the parameter."""
        return tuple(map(math.prod, self._sides(shape)))

    def tensor_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the tensor if no other parameter comes after this."""
        stored = [*self.stored_shape(shape)]
        if self.spacing > 1:
            stored[self.along] *= self.spacing
        else:
            stored[self.leading] += self.first
        return tuple(stored)

    def stored_index(self, shape: Shape, index: Index) -> Index:
        """Returns the part of the tensor that holds this part of the parameter."""
        parts = [*map(_merged, self._sides(index), self._sides(shape))]
        part = parts[self.along]
        first = self.first if self.spacing == 1 else 0
        start = first + part.start * self.spacing
        parts[self.along] = slice(start, first + part.stop * self.spacing)
        return tuple(parts)

    def from_stored(self, part: np.ndarray, shape: Shape) -> np.ndarray:
        """Views a part of the tensor as a part (of this shape) of the parameter."""
        part = self._turned(part)
        if self.spacing > 1:
            part = part[..., self.first :: self.spacing]
        if not self.order:
            return part.reshape(shape)
        ordered = part.reshape([shape[axis] for axis in self.order])
        return ordered.transpose(np.argsort(self.order))

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """Returns the parameter as the tensor, in the tensor's order in memory."""
        stored = self.stored_shape(array.shape)
        if self.order:
            array = array.transpose(self.order)
        if self.is_turned:
            lead = stored[: self.leading]
            stored = (*lead, *reversed(stored[self.leading :]))
        return np.ascontiguousarray(self._turned(array.reshape(stored)))

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        """Returns a tensor of the parameters that it holds, of which this is one."""
        if len(parts) == 1:
            return parts[0]
        if self.spacing == 1:
            return np.concatenate(parts, self.along)
        shape = [*parts[0].shape]
        axis = self.along % len(shape)
        shape[axis] = -1
        return np.stack(parts, axis + 1).reshape(shape)

    def _turned(self, array: np.ndarray) -> np.ndarray:
        """Reverses the axes after the leading ones, where inputs come last there."""
        if not self.is_turned:
            return array
        leading = range(self.leading)
        return array.transpose(*leading, *reversed(range(self.leading, array.ndim)))

    def _sides(self, axes: tuple) -> list[tuple]:
        """Returns the axes that are one of the tensor's each, in its order."""
        axes = tuple(axes[axis] for axis in self.order) or tuple(axes)
        leading = [(axis,) for axis in axes[: self.leading]]
        axes = axes[self.leading :]
        sides = [axes[: self.input_axes], axes[self.input_axes :]]
        if self.is_turned:
            sides.reverse()
        sides = [side for side in sides if side]
        if self.has_gap:
            sides.insert(1, ())
        return leading + sides


LAYER = "model.layers.{layer}."

HEAD = Weight(("head",), "lm_head.weight", 1)
EMBEDDING = Weight(("embedding",), "model.embed_tokens.weight", 1, is_turned=False)
# Of a layer: ours, theirs, and how many axes are inputs.
_OF_LAYERS = {
    "attention.query": ("self_attn.q_proj.weight", 1),
    "attention.key": ("self_attn.k_proj.weight", 1),
    "attention.value": ("self_attn.v_proj.weight", 1),
    "attention.output": ("self_attn.o_proj.weight", 2),
    "attention.query_bias": ("self_attn.q_proj.bias", 0),
    "attention.key_bias": ("self_attn.k_proj.bias", 0),
    "attention.value_bias": ("self_attn.v_proj.bias", 0),
    "attention.output_bias": ("self_attn.o_proj.bias", 0),
    "attention.query_norm.scale": ("self_attn.q_norm.weight", 0),
    "attention.key_norm.scale": ("self_attn.k_norm.weight", 0),
    "attention.sinks": ("self_attn.sinks", 0),
    "feed_forward.gate": ("mlp.gate_proj.weight", 1),
    "feed_forward.up": ("mlp.up_proj.weight", 1),
    "feed_forward.down": ("mlp.down_proj.weight", 1),
}
_OF_DELTA = {
    **{
        f"attention.{name}{end}": (f"linear_attn.{name}{end}.weight", 1)
        for end in ("", "_kernel")
        for name in ("query", "key", "value")
    },
    "attention.output_gate": ("linear_attn.in_proj_z.weight", 1),
    "attention.beta": ("linear_attn.in_proj_b.weight", 1),
    "attention.decay": ("linear_attn.in_proj_a.weight", 1),
    "attention.log_rate": ("linear_attn.A_log", 0),
    "attention.decay_bias": ("linear_attn.dt_bias", 0),
    "attention.norm.scale": ("linear_attn.norm.weight", 0),
    "attention.output": ("linear_attn.out_proj.weight", 2),
    **{k: v for k, v in _OF_LAYERS.items() if k.startswith("feed_forward")},
}
# Names of ours that lie below each other in one tensor.
_FUSED = dict.fromkeys(("query", "key", "value"), "in_proj_qkv")
_FUSED |= dict.fromkeys(("query_kernel", "key_kernel", "value_kernel"), "conv1d")
_STACKS = {"layers": _OF_LAYERS, "delta_layers": _OF_DELTA}
_DENSE = "dense_layers"
_WEIGHTS = (
    EMBEDDING,
    *(
        Weight(
            (stack, *ours.split(".")),
            f"{LAYER}{theirs}",
            inputs,
            has_gap=ours.endswith("_kernel"),
        )
        for stack, weights in [*_STACKS.items(), (_DENSE, _OF_LAYERS)]
        for ours, (theirs, inputs) in weights.items()
    ),
    Weight(("norm", "scale"), "model.norm.weight"),
    HEAD,
)
_EXPERT = "mlp.experts.{expert}."
_OF_QWEN = {
    "router": Weight((), "mlp.gate.weight", 1),
    "shared_gate": Weight((), "mlp.shared_expert.gate_proj.weight", 1),
    "shared_up": Weight((), "mlp.shared_expert.up_proj.weight", 1),
    "shared_down": Weight((), "mlp.shared_expert.down_proj.weight", 1),
    "shared_weight": Weight((), "mlp.shared_expert_gate.weight", 1),
}
_OF_GLM = {
    "router_bias": Weight((), "mlp.gate.e_score_correction_bias"),
    "shared_gate": Weight((), "mlp.shared_experts.gate_proj.weight", 1),
    "shared_up": Weight((), "mlp.shared_experts.up_proj.weight", 1),
    "shared_down": Weight((), "mlp.shared_experts.down_proj.weight", 1),
}
_MIXTRAL = "block_sparse_moe.experts.{expert}."
_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"
EXPERTS: dict[str, dict[str, Weight]] = {
    "by_expert": {
        **_OF_QWEN,
        "gate": Weight((), f"{_EXPERT}gate_proj.weight", 1),
        "up": Weight((), f"{_EXPERT}up_proj.weight", 1),
        "down": Weight((), f"{_EXPERT}down_proj.weight", 1),
    },
    "mixtral": {
        "gate": Weight((), f"{_MIXTRAL}w1.weight", 1),
        "up": Weight((), f"{_MIXTRAL}w3.weight", 1),
        "down": Weight((), f"{_MIXTRAL}w2.weight", 1),
        "router": Weight((), "block_sparse_moe.gate.weight", 1),
    },
    "whole": {
        **_OF_QWEN,
        "gate": Weight((), _GATE_UP, 1, leading=1),
        "up": Weight((), _GATE_UP, 1, leading=1),
        "down": Weight((), _DOWN, 1, leading=1),
    },
    "gpt_oss": {
        "gate": Weight((), _GATE_UP, 1, is_turned=False, leading=1, spacing=2),
        "up": Weight((), _GATE_UP, 1, is_turned=False, leading=1, spacing=2),
        "gate_bias": Weight((), f"{_GATE_UP}_bias", leading=1, spacing=2),
        "up_bias": Weight((), f"{_GATE_UP}_bias", leading=1, spacing=2),
        "down": Weight((), _DOWN, 1, is_turned=False, leading=1),
        "down_bias": Weight((), f"{_DOWN}_bias", leading=1),
        "router": Weight((), "mlp.router.weight", 1),
        "router_bias": Weight((), "mlp.router.bias"),
    },
}
"""How families keep the parameters of experts: ours by name, without the layer."""
EXPERTS["glm"] = EXPERTS["by_expert"] | _OF_GLM
EXPERTS["glm_whole"] = EXPERTS["whole"] | _OF_GLM
_LEFT_OUT = ("vision_tower.", "multi_modal_projector.", "visual.", "mtp.")
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_post_norm": "post_feedforward_layernorm",
}


def weights_of(
    model: Model, fused: Mapping[str, str] = {}, experts: str = "by_expert"
) -> tuple[Weight, ...]:
    """Returns where each parameter of a language model is kept.

    fused: names of matrices, such as "q_proj", and of what holds them one below the
      other.
    experts: a name of `EXPERTS`, how a mixture of experts is kept.
    """
    # One name means another norm where none stand behind.
    norms = dict(_NORMS)
    if model.config.norms == "before":
        norms["feed_forward_norm"] = _NORMS["attention_post_norm"]
    known = list(_WEIGHTS)
    count = model.config.experts
    if count:
        known = [w for w in known if "feed_forward" not in w.path or _DENSE in w.path]
        known += _of_experts(count, EXPERTS[experts])
    for stack in (*_STACKS, _DENSE):
        for ours, theirs in norms.items():
            path = (stack, ours, "scale")
            known.append(Weight(path, f"{LAYER}{theirs}.weight"))
    shapes = traverse_util.flatten_dict(model.shapes)
    weights = []
    rows = Counter()  # of a tensor, or columns, that the parameters so far fill
    for weight in known:
        if weight.path not in shapes:
            continue
        if weight.is_stacked:
            numbers = model.config.numbers(weight.path[0])
            weight = replace(weight, numbers=(*numbers,))
        module = weight.name.split(".")[-2]
        if whole := (_FUSED | {**fused}).get(module):
            weight = replace(weight, name=weight.name.replace(module, whole))
        # Kinds of layers share names, and not tensors.
        tensor = weight.path[0], weight.name
        weight = replace(weight, first=rows[tensor])
        shape = shapes[weight.path].shape[weight.stacked :]
        size = weight.stored_shape(shape)[weight.leading] if shape else 0
        rows[tensor] += size if weight.spacing == 1 else 1
        weights.append(weight)
    return tuple(weights)


def _of_experts(count: int, form: Mapping[str, Weight]) -> Iterator[Weight]:
    """Yields where the parameters of experts are kept, of which a layer has `count`."""
    for stack in _STACKS:
        for ours, weight in form.items():
            experts = count if "{expert}" in weight.name else 0
            path = (stack, "feed_forward", ours)
            name = f"{LAYER}{weight.name}"
            yield replace(weight, path=path, name=name, experts=experts)


def text_name(name: str) -> str | None:
    """Returns a tensor's name in a text model; None if it is of images, or a draft.

    transformers 4.52 began to write "model." in front, and 5 ended it.
    """
    plain = name.removeprefix("model.")
    if plain.startswith(_LEFT_OUT):
        return None
    if name.startswith("model.language_model."):
        return "model." + plain.removeprefix("language_model.")
    return name.removeprefix("language_model.")


def stored_shapes(
    weights: Sequence[Weight], model: Model
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every tensor that makes up the model."""
    shapes = traverse_util.flatten_dict(model.shapes)
    stored = {}
    for weight in weights:
        shape = shapes[weight.path].shape[weight.stacked :]
        stored |= dict.fromkeys(weight.names, weight.tensor_shape(shape))
    return stored


def dtype_of(name: str, dtype: str) -> str:
    """Returns the type that a tensor is written in, of a model of this type.

    Biases by which experts are chosen are float32 in all files, and transformers keeps
    them so: rounded, they choose other experts.
    """
    return "float32" if name.endswith(".e_score_correction_bias") else dtype


def weight_at(path: tuple[str, ...]) -> Weight:
    """Returns where the parameter of this path is kept."""
    return next(weight for weight in _WEIGHTS if weight.path == path)


def _merged(index: Sequence[slice], shape: Sequence[int]) -> slice:
    """Returns the part of axes merged into one; only the first may be cut."""
    if not index:
        return slice(0, 1)
    inner = math.prod(shape[1:])
    for part, size in zip(index[1:], shape[1:], strict=True):
        if part.indices(size) != (0, size, 1):
            raise ValueError(
                f"{index=} of {shape=} is not one piece of the stored axis: shard "
                "heads, and not the insides of one"
            )
    start, stop, _ = index[0].indices(shape[0])
    return slice(start * inner, stop * inner)
