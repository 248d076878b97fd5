"""Counts the FLOPs of matrix products in HLO, however a compiler prints them."""

import functools
import itertools
import json
import math
import re

from tools.lib.compiled.hlo_text import Array, Computation, Operation

PRODUCTS = ("convolution", "dot", "custom-call")
"""Opcodes that can be matrix products."""

PASSES = {"high": 3, "highest": 6}
"""bfloat16 products for one of float32 on a TPU, by precision; otherwise 1, which is
less than a GPU takes."""

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:lt\$)?matmul|__cublas\$gemm')
_FIELDS = ("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1)
"""Of a window, with their defaults; of the padding, that in front."""

_WINDOW = re.compile(r"(\w+)=([\dx_-]+)")


def product_flops(computation: Computation, operation: Operation) -> float:
    """Returns the FLOPs of a matrix product at the rate of bfloat16; 0 of others."""
    is_product = operation.opcode in ("convolution", "dot")
    if not (is_product or _GEMM.search(operation.rest)):
        return 0.0
    left, right, *_ = computation.operands(operation)
    if operation.opcode == "convolution":
        depth = _convolved(operation, left.results[0], right.results[0])
    elif operation.opcode == "dot":
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
        depth = _contracted(left.results[0], axes[1].split(","))
    else:
        config = json.loads(operation.rest.split("backend_config=")[-1])
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        depth = _contracted(left.results[0], numbers["lhs_contracting_dimensions"])
    is_float32 = any(one.results[0].dtype == "f32" for one in (left, right))
    precision = re.search(r"operand_precision=\{(\w+)", operation.rest)
    passes = PASSES.get(precision[1], 1) if precision and is_float32 else 1
    return 2.0 * operation.results[0].elements * depth * passes


def _contracted(left: Array, axes: list[str]) -> int:
    return math.prod(left.sizes[int(axis)] for axis in axes if axis)


def _convolved(operation: Operation, left: Array, right: Array) -> float:
    """Returns the products that are summed for a result of a convolution, on average.

    A window counts where it lies on the operand and not on its padding: TPUs print
    products with several axes of columns, or of batches, as such windows.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", operation.rest)
    window = re.search(r"window=\{([^}]*)\}", operation.rest)
    given = dict(_WINDOW.findall(window[1])) if window else {}
    depth = float(right.sizes[labels[2].index("i")])
    places = (left, labels[1]), (right, labels[2]), (operation.results[0], labels[3])
    for axis in range(len(labels[1]) - 2):
        size, width, results = (
            array.sizes[letters.index(str(axis))] for array, letters in places
        )
        window = [
            int(given[name].split("x")[axis].split("_")[0])
            if name in given
            else default
            for name, default in _FIELDS
        ]
        depth *= _on_operand(size, width, results, *window) / results
    return depth


@functools.cache
def _on_operand(
    size: int, width: int, results: int, stride: int, low: int, dilate: int, step: int
) -> int:
    """Counts the pairs of a result and a place of its window that is on the operand."""
    pairs = itertools.product(range(results), range(width))
    at = (result * stride + place * step - low for result, place in pairs)
    return sum(x % dilate == 0 and 0 <= x // dilate < size for x in at)
