"""XLA options with which the transfers of a ring overlap compute."""

from .device import rings_both_ways

TRANSFERS = 32
"""In flight on a TPU: on six ring orders, keys, values and the gradients of both."""


def compiler_options(device_kind: str) -> dict[str, str]:
    """Returns XLA's options for `jax.jit(step, compiler_options=...)`.

    On TPUs, the scheduler starts transfers only when they are waited for in a loop that
    it estimates to exceed the memory. It overestimates (7B on v3 left half of the
    memory), so its limit is a tenth more than the memory. A v3 needs an option of its
    own to start any transfer ahead. All TPUs need one for the all-to-alls of `ulysses`,
    and where rings go both ways one for more than the default of five transfers.

    On GPUs, the scheduler has one collective in flight by default, and overlaps further
    gathers of parameters with attention instead of the ring's transfers.

    On a CPU LLVM prefers vectors of 256 bits to the 512 that newer ones have, at which
    attention, forward and backward, is 4 % slower on an EPYC of 2024 (Zen 5).
    """
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
    if device_kind == "cpu":
        options["xla_cpu_prefer_vector_width"] = "512"
    return options
