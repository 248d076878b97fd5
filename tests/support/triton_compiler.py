"""Compiles the Triton kernels for GPUs that are not there."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.backends.triton_gpu import kernels as triton_kernels
from kernels.backends.triton_gpu.block_sizes import TritonBlocks
from kernels.backends.triton_gpu.launch import Sizes

KIBIBYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
SHARED_MEMORY = {capability: size * 1024 for capability, size in KIBIBYTES.items()}
"""Bytes that a program may have, by compute capability."""

POINTERS = {
    jnp.dtype(jnp.bfloat16): "*bf16",
    jnp.dtype(jnp.float16): "*fp16",
    jnp.dtype(jnp.float32): "*fp32",
    jnp.dtype(jnp.int32): "*i32",
}

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Resources(NamedTuple):
    """Resources of a program: registers of a thread, bytes of stack, shared memory."""

    registers: int
    stack: int
    shared_memory: int


class TritonCompiler:
    """Takes the place of `launch.triton_call`: compiles, and computes nothing.

    resources: name and resources of each kernel compiled, in order.
    """

    def __init__(self):
        self.resources: list[tuple[str, Resources]] = []

    def __call__(
        self,
        kernel: str,
        operands: tuple[jax.Array, ...],
        results: tuple[jax.ShapeDtypeStruct, ...],
        *,
        programs: int,
        sizes: Sizes,
        blocks: TritonBlocks,
        capability: int,
    ) -> tuple[jax.Array, ...]:
        assert programs < 2**31
        arrays = *operands, *results
        function = getattr(triton_kernels, kernel)
        types = [*(POINTERS[jnp.dtype(x.dtype)] for x in arrays), "constexpr"]
        # Arrays begin at multiples of 16 bytes, which jax-triton takes for granted too.
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
        signature = dict(zip(function.arg_names, types, strict=True))
        compiled = triton.compile(
            ASTSource(function, signature, {"sizes": sizes}, aligned),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": blocks.warps, "num_stages": blocks.stages},
        )
        self.resources.append((kernel, _resources(compiled)))
        return tuple(jnp.zeros(x.shape, x.dtype) for x in results)


def _resources(compiled) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())
    return Resources(registers, stack, compiled.metadata.shared)
