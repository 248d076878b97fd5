"""Registers, spills, shared memory and loops of compiled Mosaic GPU kernels.

Read from what Mosaic, ptxas and nvdisasm print while they compile.
"""

import contextlib
import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from tests.support.sass import cuda_root, read_pipeline
from tools.lib.compiled.gpus import SHARED_BYTES
from tools.lib.compiled.pods import compile_for, gpu_devices

DUMPS = "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_HOST_LLVM", "MOSAIC_GPU_DUMP_SASS"
"""Environment variables that make Mosaic print ptxas' output, the launch and SASS."""

NAME = r"Compiling entry function '(\w+)_mosaic_gpu_kernel'"
SPILLS = r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"


@dataclass(frozen=True)
class Kernel:
    """Resources of a compiled Mosaic GPU kernel.

    registers: per thread at launch; the kernel reassigns them between warpgroups.
    spill_bytes: spill stores and loads.
    serialized: WGMMAs that ptxas serialised (its warning C7513).
    shared_bytes: shared memory of a thread block.
    grid: thread blocks along x, y and z.
    sass: the machine code.
    """

    name: str
    registers: int
    spill_bytes: int
    serialized: int
    shared_bytes: int
    grid: tuple[int, int, int]
    sass: str = field(repr=False)

    @property
    def pipeline(self) -> tuple[str, ...]:
        """Products, waits and exponentials of the loop: see `read_pipeline`."""
        return read_pipeline(self.sass)


class Inspected(NamedTuple):
    """A compiled program and its Mosaic GPU kernels."""

    program: jax.stages.Compiled
    kernels: list[Kernel]


def inspect(function: Callable[..., Any], *arguments: Any) -> Inspected:
    """Compiles for a described H200, and reads the resources of Mosaic GPU kernels.

    Raises:
      ValueError: Mosaic prints otherwise than expected.
    """
    mesh = Mesh(np.array(gpu_devices("h200")), ("device",))
    with _printed() as file:
        program = compile_for(mesh, function, *arguments)
        ctypes.CDLL(None).fflush(None)  # C's buffers
        printed = Path(file).read_text()
    return Inspected(program, read_kernels(printed))


def spilled(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any
) -> list[tuple[str, int]]:
    """Compiles for a mesh; returns name and spilled bytes of each Mosaic kernel."""
    with _printed() as file:
        compile_for(mesh, function, *arguments)
        ctypes.CDLL(None).fflush(None)  # C's buffers
        printed = Path(file).read_text()
    names = re.findall(NAME, printed)
    spills = [sum(map(int, pair)) for pair in re.findall(SPILLS, printed)]
    return sorted(zip(names, spills, strict=True))


def assert_nothing_spills_and_products_overlap(
    kernels: list[Kernel], names: set[str], least_shared_bytes: int
) -> None:
    assert sorted(kernel.name for kernel in kernels) == sorted(names)
    for kernel in kernels:
        assert (kernel.spill_bytes, kernel.serialized) == (0, 0)
        # What three warpgroups can start with; consumers go on with more.
        assert kernel.registers == 168
        assert least_shared_bytes < kernel.shared_bytes <= SHARED_BYTES


def read_kernels(printed: str) -> list[Kernel]:
    """Reads the kernels from Mosaic's output, in the order in which they compiled.

    Raises:
      ValueError: something is missing that was asked for in `DUMPS`.
    """
    names = re.findall(NAME, printed)
    registers = re.findall(r"Used (\d+) registers", printed)
    spills = re.findall(SPILLS, printed)
    # Of a launch: programs, clusters and threads in three dimensions, shared memory.
    launch = r"call i32 @mosaic_gpu_launch_kernel\(ptr [^,]*((?:, i32 \d+){10})"
    launches = [
        [int(number) for number in re.findall(r"i32 (\d+)", numbers)]
        for numbers in re.findall(launch, printed)
    ]
    text = r"^\.text\.\w+_mosaic_gpu_kernel:\n(.*?)^//----"
    code = re.findall(text, printed, re.MULTILINE | re.DOTALL)
    if not len(names) == len(registers) == len(spills) == len(launches) == len(code):
        raise ValueError(
            f"{len(names)} kernels, but registers of {len(registers)}, spills of "
            f"{len(spills)}, launches of {len(launches)} and SASS of {len(code)}: "
            "Mosaic prints otherwise than this program reads"
        )
    return [
        Kernel(
            name,
            int(registers[i]),
            sum(map(int, spills[i])),
            len(re.findall(rf"\(C7513\).*'{name}_mosaic_gpu_kernel'", printed)),
            launches[i][-1],
            tuple(launches[i][:3]),
            code[i],
        )
        for i, name in enumerate(names)
    ]


@contextlib.contextmanager
def _printed() -> Iterator[str]:
    """Captures what libraries write to the standard output, and yields its file name.

    Python's own output goes there too.
    """
    sys.stdout.flush()
    standard_output = os.dup(1)
    variables = dict.fromkeys(DUMPS, "1") | {"MOSAIC_GPU_CUDA_ROOT": cuda_root()}
    asked = mock.patch.dict(os.environ, variables)
    with tempfile.NamedTemporaryFile() as file, asked:
        os.dup2(file.fileno(), 1)
        try:
            yield file.name
        finally:
            os.dup2(standard_output, 1)
            os.close(standard_output)
