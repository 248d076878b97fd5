"""XLA options with which collectives of parameters run beside a step's compute."""

from kernels.devices.chips import Chip

OFFLOADS = (
    "xla_tpu_enable_sparse_core_collective_offload_all_gather",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter",
    "xla_tpu_enable_sparse_core_collective_offload_all_reduce",
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs",
)
"""Options for chips with SparseCores: these run all collectives, and are given the next
ones while one is under way. Otherwise each starts only when the one before is done."""

GATHERS = {
    "TPU v4": "xla_enable_async_all_gather",
    "TPU v5e": "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call",
}
"""Options for chips without SparseCores: gathers are asynchronous on a v4, and carried
by products as they are on a v5e, by Pallas kernels too with this."""

PERMUTED = "TPU v4", "TPU v5e"
"""Chips whose scatters are waited for, and beside whose products permutes run."""

PERMUTES_FROM = 3072
"""Tokens of a device from which products outlast their gradients' permutes."""


def permutes_hide(chip: Chip | None, tokens: int) -> bool:
    """Returns whether gradients should be scattered in permutes, beside products.

    tokens: of a microbatch on a device.
    """
    return chip is not None and chip.name in PERMUTED and tokens >= PERMUTES_FROM


def parameter_options(chip: Chip | None) -> dict[str, str]:
    """Returns XLA's options for `jax.jit(step, compiler_options=...)`.

    SparseCores run all collectives, those of gradients too, beside everything. Without
    them gathers run beside products (`GATHERS`), but every scatter is waited for,
    unless it is permutes (`permutes_hide`).

    Collectives are not pipelined from layer to layer (ici_ag_pipelining,
    ici_rs_pipelining): a layer is then taken out of the loop, some of its ring
    transfers are waited for, and with scatters libtpu 0.0.48 ends the process where a
    layer has a ring in a loop ("Call graph must have been flattened").
    """
    names: tuple[str, ...] = ()
    if chip is not None and chip.sparse_cores:
        names = OFFLOADS
    elif chip is not None and chip.name in GATHERS:
        names = (GATHERS[chip.name],)
    return dict.fromkeys(names, "true")
