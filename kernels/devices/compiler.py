"""XLA options with which the transfers of a ring overlap compute."""

import functools
import logging

import jax
from jax.sharding import Mesh

from .device import rings_both_ways

TRANSFERS = 32
"""In flight on a TPU: on six ring orders, keys, values and the gradients of both."""

GPU_TRANSFERS = {
    "nccl": "COLLECTIVES_PRIVATE_MEMORY",
    "peer": "COLLECTIVES_PEER_MEMORY",
    "symmetric": "COLLECTIVES_SYMMETRIC_MEMORY",
}
"""XLA's modes by what moves a ring's shards between NVIDIA GPUs: NCCL's kernels, on SMs
that attention then lacks; copies by the copy engines into the next GPU's memory; or
NCCL's one-sided puts into memory that all have registered."""


def compiler_options(mesh: Mesh | str, gpu_transfers: str = "nccl") -> dict[str, str]:
    """Returns XLA's options for the outermost `jax.jit(step, compiler_options=...)`.

    Call it once, where your framework compiles its step. A ring cannot bring its own
    options: JAX refuses those of a jit inside another.

    On TPUs, the scheduler starts transfers only when they are waited for in a loop that
    it estimates to exceed the memory. It overestimates (7B on v3 left half of the
    memory), so its limit is a tenth more than the memory. A v3 needs an option of its
    own to start any transfer ahead. All TPUs need one for the all-to-alls of `ulysses`,
    and where rings go both ways one for more than the default of five transfers.

    On GPUs, the scheduler has one collective in flight by default, and overlaps further
    gathers of parameters with attention instead of the ring's transfers. Peer and
    symmetric transfers need all GPUs of the mesh in one process: for others XLA takes
    NCCL without a word, and here it is logged. Nobody has timed them here, and an
    earlier form of peer copies gave wrong numbers (gh:openxla/xla#19555), so NCCL is
    the default.

    On a CPU LLVM prefers vectors of 256 bits to the 512 that newer ones have, at which
    attention, forward and backward, is 4 % slower on an EPYC of 2024 (Zen 5).

    mesh: of the program; or the kind of its devices, where these are all that JAX has.
    gpu_transfers: of GPU_TRANSFERS.

    Raises:
      ValueError: unknown transfers.
    """
    if gpu_transfers not in GPU_TRANSFERS:
        raise ValueError(
            f"gpu_transfers must be one of {', '.join(GPU_TRANSFERS)}, got "
            f"{gpu_transfers!r}"
        )
    is_kind = isinstance(mesh, str)
    device_kind = mesh if is_kind else mesh.devices.flat[0].device_kind
    options = {}
    if device_kind.startswith("TPU"):
        options["xla_tpu_scheduler_percent_shared_memory_limit"] = "110"
        options["xla_tpu_enable_async_all_to_all"] = "true"
    if rings_both_ways(device_kind):
        options["xla_max_concurrent_async_collective_permutes"] = str(TRANSFERS)
    if device_kind == "TPU v3":
        options["xla_enable_async_collective_permute"] = "true"
    if device_kind.startswith("NVIDIA"):
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = "16"
    if gpu_transfers != "nccl":
        # Asking JAX starts its devices, which a pod's do together.
        processes = jax.process_count() if is_kind else _processes(mesh)
        if device_kind.startswith("NVIDIA") and processes == 1:
            options["xla_gpu_collective_permute_mode"] = GPU_TRANSFERS[gpu_transfers]
        else:
            _say_ignored(gpu_transfers, device_kind, processes)
    if device_kind == "cpu":
        options["xla_cpu_prefer_vector_width"] = "512"
    return options


def _processes(mesh: Mesh) -> int:
    return len({device.process_index for device in mesh.devices.flat})


@functools.cache  # so that it is logged once
def _say_ignored(gpu_transfers: str, device_kind: str, processes: int) -> None:
    logging.getLogger(__name__).warning(
        "gpu_transfers=%r is for NVIDIA GPUs of one process, and this is %s in %d: the "
        "ring's transfers stay as they are by default",
        gpu_transfers,
        device_kind,
        processes,
    )
