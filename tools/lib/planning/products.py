"""Counts the FLOPs of matrix products in HLO, however a compiler prints them."""

import math
import re

from tools.lib.compiled.hlo_text import Array, Computation, Operation

PRODUCTS = ("convolution", "dot", "custom-call")
"""Opcodes that can be matrix products."""

PASSES = {"high": 3, "highest": 6}
"""bfloat16 products for one of float32 on a TPU, by precision; otherwise 1, which is
less than a GPU takes."""

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:lt\$)?matmul|__cublas\$gemm')
_BATCH = re.compile(r'lhs_batch_dim(?:s=\{|ensions":\[)([\d,"]*)')
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


def product_flops(computation: Computation, operation: Operation) -> float:
    """Returns the FLOPs of a matrix product at the rate of bfloat16; 0 of others.

    Of b products of (m, k) and (k, n) the arrays have b m k, b k n and b m n elements:
    b m n k is the root of the three together, and b.
    """
    is_product = operation.opcode in ("convolution", "dot")
    if not (is_product or _GEMM.search(operation.rest)):
        return 0.0
    left, right, *_ = (one.results[0] for one in computation.operands(operation))
    arrays = left, right, operation.results[0]
    elements = math.prod(array.elements for array in arrays)
    products = math.sqrt(elements / _batch(operation, arrays))
    is_float32 = "f32" in (left.dtype, right.dtype)
    precision = re.search(r"operand_precision=\{(\w+)", operation.rest)
    passes = PASSES.get(precision[1], 1) if precision and is_float32 else 1
    return 2.0 * products * passes


def _batch(operation: Operation, arrays: tuple[Array, Array, Array]) -> int:
    """Returns how many products there are.

    TPUs print them as windows over an axis that all three arrays have.
    """
    if operation.opcode != "convolution":
        found = _BATCH.search(operation.rest)
        axes = re.findall(r"\d+", found[1]) if found else []
        return math.prod(arrays[0].sizes[int(axis)] for axis in axes)
    labels = _LABELS.search(operation.rest).groups()
    lengths = [
        {
            array.sizes[letters.index(str(axis))]
            for array, letters in zip(arrays, labels, strict=True)
        }
        for axis in range(len(labels[0]) - 2)
    ]
    return math.prod(found.pop() for found in lengths if len(found) == 1)
