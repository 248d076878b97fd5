"""H200 GPUs that are described instead of attached, and compiling for them.

The CUDA plug-in of JAX holds XLA's compiler for GPUs, and ptxas makes the machine code:
neither needs a GPU. Everything up to the machine code is real, and nothing can run. Set
JAX_PLATFORMS=cpu where no GPU is attached, or JAX looks for one.
"""

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHARED_BYTES = 232448
"""Shared memory that a program may have (227 KiB)."""

DESCRIPTION = f"""
gpu_device_info {{
  cuda_compute_capability {{
    major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES
  }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {SHARED_BYTES}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_core_limit: 2048
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  device_vendor: "NVIDIA Corporation"
  name: "NVIDIA H200"
  platform_version: "Compute Capability 9.0a"
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA H200"
"""
"""What XLA has to know of the GPU: a `stream_executor.GpuTargetConfigProto`."""

AS_SHIPPED = {
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
}
"""XLA's defaults, whatever its flags say of the programs that this process runs."""

DUMPS = "MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_HOST_LLVM"
"""Environment variables that make Mosaic print what ptxas says, and the launch."""


def described(devices: int = 1) -> list[jax.Device]:
    """So many H200s of one host, to make a mesh of.

    Raises:
      ModuleNotFoundError: there is no CUDA plug-in.
    """
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ModuleNotFoundError(
            "jax-cuda13-plugin, which holds the compiler for NVIDIA GPUs, is not "
            "installed: it is in requirements-dev.txt"
        )
    return topologies.get_topology_desc(
        "", "cuda", topology=f"1x1x{devices}", target_config=DESCRIPTION
    ).devices


def compile_for(
    mesh: Mesh, function: Callable[..., Any], *arguments: Any
) -> jax.stages.Compiled:
    """Compiles a function for a mesh of described GPUs.

    function: jitted (with its donations and shardings) or not.
    arguments: trees of `jax.ShapeDtypeStruct`; replicated where without a sharding.
    """

    def place(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = shape.sharding or NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    if not isinstance(function, jax.stages.Wrapped):
        function = jax.jit(function)
    # Some kernels ask for the GPU they are compiled for, and look for it here.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = function.trace(*jax.tree.map(place, arguments))
        lowered = traced.lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=AS_SHIPPED)


@dataclass(frozen=True)
class Kernel:
    """What is known of a compiled Mosaic GPU kernel.

    registers: of a thread when it starts; the kernel shifts them between warpgroups.
    spill_bytes: stored to and loaded from memory, for want of registers.
    serialized: products that ptxas made wait for each other (its warning C7513).
    shared_bytes: shared memory of a program.
    grid: programs along x, y and z.
    """

    name: str
    registers: int
    spill_bytes: int
    serialized: int
    shared_bytes: int
    grid: tuple[int, int, int]


class Inspected(NamedTuple):
    """A compiled program, and the Mosaic GPU kernels that were compiled for it."""

    program: jax.stages.Compiled
    kernels: list[Kernel]


def inspect(mesh: Mesh, function: Callable[..., Any], *arguments: Any) -> Inspected:
    """As `compile_for`, with facts on the program's Mosaic GPU kernels.

    Raises:
      ValueError: Mosaic prints otherwise than expected.
    """
    with _printed() as file:
        program = compile_for(mesh, function, *arguments)
        ctypes.CDLL(None).fflush(None)  # what C wrote and still holds
        printed = Path(file).read_text()
    return Inspected(program, read_kernels(printed))


def read_kernels(printed: str) -> list[Kernel]:
    """The kernels in what Mosaic printed, in the order in which they were compiled.

    Raises:
      ValueError: something is missing that was asked for in `DUMPS`.
    """
    names = re.findall(r"Compiling entry function '(\w+)_mosaic_gpu_kernel'", printed)
    registers = re.findall(r"Used (\d+) registers", printed)
    frame = r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    spills = re.findall(frame, printed)
    # Of a launch: programs, clusters and threads in three dimensions, shared memory.
    launch = r"call i32 @mosaic_gpu_launch_kernel\(ptr [^,]*((?:, i32 \d+){10})"
    launches = [
        [int(number) for number in re.findall(r"i32 (\d+)", numbers)]
        for numbers in re.findall(launch, printed)
    ]
    if not len(names) == len(registers) == len(spills) == len(launches):
        raise ValueError(
            f"{len(names)} kernels, but registers of {len(registers)}, spills of "
            f"{len(spills)} and launches of {len(launches)}: Mosaic prints otherwise "
            "than this program reads"
        )
    return [
        Kernel(
            name,
            int(registers[i]),
            sum(map(int, spills[i])),
            len(re.findall(rf"\(C7513\).*'{name}_mosaic_gpu_kernel'", printed)),
            launches[i][-1],
            tuple(launches[i][:3]),
        )
        for i, name in enumerate(names)
    ]


@contextlib.contextmanager
def _printed() -> Iterator[str]:
    """Name of a file with what libraries write to the standard output meanwhile.

    Python's own output goes there too.
    """
    before = {name: os.environ.get(name) for name in DUMPS}
    sys.stdout.flush()
    standard_output = os.dup(1)
    with tempfile.NamedTemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.environ.update(dict.fromkeys(DUMPS, "1"))
        try:
            yield file.name
        finally:
            os.dup2(standard_output, 1)
            os.close(standard_output)
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
