"""Tensors of gpt-oss's files in MXFP4: 4-bit floats with a scale for each 32."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of the two tensors, uint8, that hold one."""
BLOCK = 32
"""Numbers that share a scale."""
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
"""Of 4 bits, of which the first is the sign (E2M1)."""
BIAS = 127
"""Of a scale's exponent (E8M0)."""


@dataclass(frozen=True)
class Dequantised:
    """A tensor (X, inputs, outputs) as float32, read slice by slice.

    blocks: (X, outputs, inputs / 32, 16), two numbers in a byte, the low bits first.
    scales: (X, outputs, inputs / 32), powers of two. As safetensors gives both.
    """

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        experts, outputs, blocks, _ = self.blocks.get_shape()
        return [experts, blocks * BLOCK, outputs]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        experts, inputs, outputs = index
        start, stop, _ = inputs.indices(self.get_shape()[1])
        begin = start // BLOCK
        held = (experts, outputs, slice(begin, -(-stop // BLOCK)))
        blocks = self.blocks[(*held, slice(None))]
        scales = self.scales[held].astype(np.int32) - BIAS
        numbers = np.stack([VALUES[blocks & 15], VALUES[blocks >> 4]], -1)
        numbers = np.ldexp(numbers.reshape(*blocks.shape[:3], BLOCK), scales[..., None])
        whole = numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
        return whole[:, start - begin * BLOCK : stop - begin * BLOCK]


def dequantised(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tensors with one for each pair of blocks and scales.

    Raises:
      ValueError: blocks without scales, or of other shapes.
    """
    kept = dict(tensors)
    for name in tensors:
        if not name.endswith(BLOCKS):
            continue
        plain = name.removesuffix(BLOCKS)
        blocks = kept.pop(name)
        scales = kept.pop(plain + SCALES, None)
        shape = blocks.get_shape()
        if scales is None or [*scales.get_shape(), BLOCK // 2] != shape:
            held = scales and scales.get_shape()
            wanted = shape[:-1]
            raise ValueError(
                f"{plain}{SCALES} must be {wanted}, for blocks {shape}, got "
                f"{held}: copy the model again"
            )
        kept[plain] = Dequantised(blocks, scales)
    return kept
