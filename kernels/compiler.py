"""Options with which XLA hides the transfers of a ring."""


def compiler_options(device_kind: str) -> dict[str, str]:
    """Returns XLA's options for `jax.jit(step, compiler_options=...)`.

    With them the transfers of a ring are hidden and a CPU is used whole.

    In a loop that the scheduler of TPUs takes for too large for the memory, it starts
    transfers only when they are waited for. It thinks of more than there will be (7B on
    v3 left half of the memory), so it is given a tenth more than there is. v3 starts
    none ahead unless it is told so.

    That of GPUs has one collective under way at a time unless told otherwise, and hides
    the next gathers of parameters behind attention in place of the ring's transfers.

    On a CPU LLVM prefers vectors of 256 bits to the 512 that newer ones have, at which
    attention, forward and backward, is 4 % slower on an EPYC of 2024 (Zen 5).
    """
    options = {}
    if device_kind.startswith("TPU"):
        options["xla_tpu_scheduler_percent_shared_memory_limit"] = "110"
    if device_kind == "TPU v3":
        options["xla_enable_async_collective_permute"] = "true"
    if device_kind.startswith("NVIDIA"):
        options["xla_gpu_experimental_parallel_collective_overlap_limit"] = "16"
    if device_kind == "cpu":
        options["xla_cpu_prefer_vector_width"] = "512"
    return options
