"""LLaMA's parameters under the names and in the layout of Hugging Face.

There a matrix is stored as (outputs, inputs), all heads in one axis, and every layer
has tensors of its own; here it is (inputs, outputs), heads apart, and layers stacked.
Heads' sizes are in one order on both sides, as both rotate the pairs (i, i + D/2) in
RoPE (Meta's own files hold the pairs (2i, 2i + 1), and are another format).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Weight:
    """One parameter of ours and the tensor, or the tensor of each layer, it is kept in.

    path: in the tree of parameters.
    name: of the tensor; "{layer}" stands for the layer's number.
    input_axes: how many of the leading axes are the inputs of a matrix that is stored
      as (outputs, inputs); 0 for what is stored as it is.

    Shapes and indices below are those of one layer.
    """

    path: tuple[str, ...]
    name: str
    input_axes: int = 0

    @property
    def is_stacked(self) -> bool:
        """Whether each layer has its own tensor; the parameter holds all layers."""
        return "{layer}" in self.name

    def names(self, layers: int) -> list[str]:
        """Names of the tensors, in the order of the layers."""
        if not self.is_stacked:
            return [self.name]
        return [self.name.format(layer=layer) for layer in range(layers)]

    def stored_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the tensor, from that of the parameter."""
        inputs, outputs = self._sides(shape)
        return (math.prod(outputs), math.prod(inputs)) if inputs else shape

    def stored_index(self, shape: Shape, index: Index) -> Index:
        """Returns the part of the tensor that holds this part of the parameter."""
        inputs, outputs = self._sides(shape)
        if not inputs:
            return index
        own_inputs, own_outputs = self._sides(index)
        return _merged(own_outputs, outputs), _merged(own_inputs, inputs)

    def from_stored(self, part: np.ndarray, shape: Shape) -> np.ndarray:
        """Views a part of the tensor as a part (of this shape) of the parameter."""
        return part.T.reshape(shape) if self.input_axes else part

    def to_stored(self, array: np.ndarray) -> np.ndarray:
        """Returns the parameter as the tensor, in the tensor's order in memory."""
        if not self.input_axes:
            return array
        stored = self.stored_shape(array.shape)
        return np.ascontiguousarray(array.reshape(stored[::-1]).T)

    def _sides(self, axes: tuple) -> tuple[tuple, tuple]:
        return axes[: self.input_axes], axes[self.input_axes :]


_LAYER = "model.layers.{layer}."
_ATTENTION, _MLP = f"{_LAYER}self_attn.", f"{_LAYER}mlp."

HEAD = Weight(("head",), "lm_head.weight", 1)
EMBEDDING = Weight(("embedding",), "model.embed_tokens.weight")
TIED_HEAD = Weight(HEAD.path, EMBEDDING.name, 1)
"""Where there is no head, it is the embedding: (V, E) is (outputs, inputs) of one."""

WEIGHTS = (
    EMBEDDING,
    Weight(("layers", "attention_norm", "scale"), f"{_LAYER}input_layernorm.weight"),
    Weight(("layers", "attention", "query"), f"{_ATTENTION}q_proj.weight", 1),
    Weight(("layers", "attention", "key"), f"{_ATTENTION}k_proj.weight", 1),
    Weight(("layers", "attention", "value"), f"{_ATTENTION}v_proj.weight", 1),
    Weight(("layers", "attention", "output"), f"{_ATTENTION}o_proj.weight", 2),
    Weight(
        ("layers", "feed_forward_norm", "scale"),
        f"{_LAYER}post_attention_layernorm.weight",
    ),
    Weight(("layers", "feed_forward", "gate"), f"{_MLP}gate_proj.weight", 1),
    Weight(("layers", "feed_forward", "up"), f"{_MLP}up_proj.weight", 1),
    Weight(("layers", "feed_forward", "down"), f"{_MLP}down_proj.weight", 1),
    Weight(("norm", "scale"), "model.norm.weight"),
    HEAD,
)


def is_derived(name: str) -> bool:
    """Returns whether a tensor follows from config.json (in older files)."""
    return name.endswith("rotary_emb.inv_freq")


def _merged(index: Sequence[slice], shape: Sequence[int]) -> slice:
    """Returns the part of axes merged into one; only the first may be cut."""
    inner = math.prod(shape[1:])
    for part, size in zip(index[1:], shape[1:], strict=True):
        if part.indices(size) != (0, size, 1):
            raise ValueError(
                f"{index=} of {shape=} is not one piece of the stored axis: shard "
                "heads, and not the insides of one"
            )
    start, stop, _ = index[0].indices(shape[0])
    return slice(start * inner, stop * inner)
