"""Runs the Triton kernels without a GPU: Triton interprets them on a CPU, in NumPy.

Each array of a kernel lies between two stretches of nan, where what is read by mistake
shows, and what is written by mistake is found.
"""

import contextlib
import importlib.util
import threading
import warnings
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from kernels.backends.triton_gpu import kernels as triton_kernels
from kernels.backends.triton_gpu.block_sizes import KernelBlocks, TritonBlocks
from kernels.backends.triton_gpu.launch import Launch, Sizes

# Short problems have several tiles.
SMALL_BLOCKS = KernelBlocks(
    TritonBlocks(32, 16, 4, 2), TritonBlocks(16, 32, 4, 2), TritonBlocks(16, 64, 4, 2)
)

LARGE_BLOCKS = KernelBlocks(*[TritonBlocks(128, 128, 4, 2)] * 3)
"""Each program is interpreted in Python: these have few, for long problems."""

POINTERS = {
    np.dtype(ml_dtypes.bfloat16): tl.bfloat16,
    np.dtype(np.float16): tl.float16,
    np.dtype(np.float32): tl.float32,
    np.dtype(np.int32): tl.int32,
}

MARGIN = 2**18
"""Bytes before and after each array: more than a tile's rows take, or a read by mistake
would find what is not nan."""


INTERPRETER_LOCK = threading.Lock()
"""XLA runs kernels that do not wait for each other at once; the interpreter is one."""


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Makes Triton interpret what is decorated within, and its own functions."""
    with INTERPRETER_LOCK, contextlib.ExitStack() as undo:
        undo.enter_context(triton.knobs.runtime.scope())
        triton.knobs.runtime.interpret = True
        for name in "max", "sum":
            function = getattr(tl, name)
            undo.callback(setattr, tl, name, function)
            setattr(tl, name, interpreter.InterpretedFunction(function.fn))
        # NumPy has no bfloat16: the interpreter would multiply its bits as integers,
        # and round towards zero.
        builder = interpreter.interpreter_builder
        for name, function in ("create_dot", _dot), ("create_fp_trunc", _narrowed):
            undo.callback(setattr, builder, name, getattr(builder, name))
            setattr(builder, name, function)
        # Once for all: Triton does not undo what it patches for functions of functions.
        modules = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        undo.callback(interpreter._patch_lang(modules).restore)
        undo.callback(setattr, interpreter, "_patch_lang", interpreter._patch_lang)
        interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
        yield


def _dot(a, b, accumulator, input_precision, max_num_imprecise_acc):
    """Multiplies and adds up in float32, as a GPU does."""
    assert input_precision == triton._C.libtriton.ir.INPUT_PRECISION.IEEE
    product = _wide(a) @ _wide(b) + accumulator.data
    return interpreter.TensorHandle(product, accumulator.dtype.scalar)


def _narrowed(x, block_type):
    """Rounds float32 to the nearest of a narrower type."""
    dtype = block_type.scalar
    if dtype != tl.bfloat16:
        return interpreter.TensorHandle(x.data.astype(np.float16), dtype)
    bits = x.data.astype(ml_dtypes.bfloat16).view(np.uint16)
    return interpreter.TensorHandle(bits, dtype)


def _wide(x) -> np.ndarray:
    bits = x.data
    is_bfloat16 = x.dtype.scalar == tl.bfloat16
    return (bits.view(ml_dtypes.bfloat16) if is_bfloat16 else bits).astype(np.float32)


def _interpreted_kernels() -> ModuleType:
    """Returns a second `kernels.backends.triton_gpu.kernels`, to be interpreted."""
    spec = importlib.util.find_spec(triton_kernels.__name__)
    module = importlib.util.module_from_spec(spec)
    with _interpreting():
        spec.loader.exec_module(module)
    return module


KERNELS = _interpreted_kernels()


def pointer(address: int, dtype: np.dtype) -> tl.tensor:
    """Returns the pointer that a kernel gets for an array at `address`."""
    kind = tl.pointer_type(POINTERS[dtype])
    at = np.array([address], np.uint64)
    return tl.tensor(interpreter.TensorHandle(at, kind), kind)


def interpret(kernel: str, pointers: Iterable, programs: int, sizes: Sizes) -> None:
    """Runs the programs of a kernel, one after the other."""
    # NumPy also warns of rows that are all nan.
    quiet = np.errstate(all="ignore"), warnings.catch_warnings(action="ignore")
    with _interpreting(), quiet[0], quiet[1]:
        getattr(KERNELS, kernel)[(programs,)](*pointers, sizes)


class _Guarded:
    """Array between margins of nan, and the pointer to it that a kernel gets."""

    def __init__(self, x: np.ndarray):
        # nan as a bfloat16, a float16 and a float32, and -1 as an int32.
        self.margin = np.full(MARGIN, 0xFF, np.uint8)
        flat = np.ascontiguousarray(x).view(np.uint8).ravel()
        self.memory = np.concatenate([self.margin, flat, self.margin])
        self.shape, self.dtype = x.shape, x.dtype
        self.pointer = pointer(self.memory.ctypes.data + MARGIN, x.dtype)

    def read(self) -> np.ndarray:
        for margin in self.memory[:MARGIN], self.memory[-MARGIN:]:
            assert (margin == self.margin).all(), "written outside of the array"
        return self.memory[MARGIN:-MARGIN].view(self.dtype).reshape(self.shape)


def interpreted_call(
    kernel: str,
    operands: tuple[jax.Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
    *,
    programs: int,
    sizes: Sizes,
    **options: object,
) -> tuple[jax.Array, ...]:
    """Interprets a kernel with the arguments of `launch.triton_call`."""

    def run(*operands: jax.Array) -> tuple[np.ndarray, ...]:
        given = [_Guarded(np.asarray(x)) for x in operands]
        # Where nothing is written there is nan.
        found = [_Guarded(np.full(x.shape, np.nan, x.dtype)) for x in results]
        pointers = (x.pointer for x in (*given, *found))
        interpret(kernel, pointers, programs, sizes)
        for x, before in zip(given, operands, strict=True):
            np.testing.assert_array_equal(x.read(), np.asarray(before))
        return tuple(x.read() for x in found)

    return jax.pure_callback(run, results, *operands)


SIMULATED_GPU = Launch(80, SMALL_BLOCKS, interpreted_call)
