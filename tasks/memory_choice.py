"""Chooses what a run's layers keep for the backward, by the memory that is left.

By estimate, from the config, the mesh and the table of chips alone: every start of a
run, and every one of its hosts, chooses the same.
"""

import dataclasses
import math
from typing import Any

import jax
from ml_collections import ConfigDict

from kernels.devices import chips
from tasks.run import Run
from tasks.state import abstract_frozen
from tasks.systems import AUTO, DEFAULT_REMAT
from training.sharding.mesh import HOST_MEMORY

MARGIN = 0.1
"""Share of a device's memory that is left, by estimate.

5 % are for the runtime, and 5 % as compiled steps took up to 3.6 % of the memory more
than estimated (results/2026-11-29-spare-memory.md)."""

LEAST = "nothing"
"""What layers keep where no memory is left."""

LAYER_ARRAYS = 6
"""float32 arrays of the size of the queries: the most in compiled steps on TPUs."""

RING_ARRAYS = 7
"""More of them, which hold one head group at a time."""


def settled(run: Run, before: ConfigDict | None = None) -> Run:
    """Returns a run with `remat` and `remat_budget_gib` in the place of remat=auto.

    From the last layer on, layers keep as much as fits. Where the memory of the run's
    devices is unknown, they keep what they do by default.

    before: the config of the run's last start, which goes on as it is if it fits.
    """
    if run.config.remat != AUTO:
        return run
    chip = chips.find(run.device_kind)
    if before is not None:
        same = keeping(run, before.remat, before.remat_budget_gib)
        if chip is None or estimated_bytes(same) <= chip.hbm_bytes:
            return same
    if chip is None:
        return keeping(run, DEFAULT_REMAT)
    least = keeping(run, LEAST)
    budget = (1 - MARGIN) * chip.hbm_bytes - estimated_bytes(least)
    (policy, _), *last = least.kept.climb(LEAST, max(0.0, budget))
    gib = 0.0
    for _, layers in last:
        # Rounded up: with less, a layer fewer would keep more.
        gib = math.ceil(layers * least.kept.rungs(policy)[0] / 2**30 * 1000) / 1000
    return keeping(run, policy, gib)


def keeping(run: Run, remat: str, gib: float = 0.0) -> Run:
    """Returns a run of the same with these settings."""
    return dataclasses.replace(run, config=with_remat(run.config, remat, gib))


def with_remat(config: ConfigDict, remat: str, gib: float) -> ConfigDict:
    """Returns a copy of the config with other `remat` and `remat_budget_gib`."""
    config = config.copy_and_resolve_references()
    config.update(remat=remat, remat_budget_gib=gib)
    return config


def choice_line(run: Run) -> str:
    """Returns a line on what a run's layers keep by remat=auto."""
    config = run.config
    kept = f"config.remat={config.remat}"
    if config.remat_budget_gib:
        kept += f" and config.remat_budget_gib={config.remat_budget_gib}"
    chip = chips.find(run.device_kind)
    if chip is None:
        return f"remat: auto is {kept}, as the memory of {run.device_kind} is not known"
    return (
        f"remat: auto is {kept}; {estimated_bytes(run) / 2**30:.3g} of "
        f"{chip.hbm_bytes / 2**30:.3g} GiB by estimate"
    )


def estimated_bytes(run: Run) -> float:
    """Estimates the memory that a step takes of a device."""
    held = run.state_like, abstract_frozen(run.model, run.partition)
    memory = device_bytes(held) + workspace_bytes(run)
    if run.config.remat != "offload":
        memory += saved_bytes(run)
    return memory


def device_bytes(tree: Any) -> int:
    """Returns the bytes that a tree of shapes with shardings takes of a device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != HOST_MEMORY
    )


def saved_bytes(run: Run) -> int:
    """Returns the bytes of activations that a device saves for the backward."""
    return run.kept.of(run.execution)


def workspace_bytes(run: Run) -> float:
    """Estimates the memory of a step besides its state and saved activations.

    The buffers of a ring's backward, one layer's parameters in the compute type and
    their gradients in float32, and the same gradients of embedding and head.
    """
    model = run.sizes
    tensor = run.partition.mesh.shape["tensor"]
    queries = run.local_tokens * model.num_heads * model.head_dim * 4
    tables = getattr(model, "vocab_size", 0) * model.hidden_size
    tables *= 1 if run.config.model.tied_embeddings else 2
    layer = (run.num_parameters - tables) / model.num_layers
    state = (run.compute_dtype.itemsize + 4) * layer + 4 * tables
    arrays = LAYER_ARRAYS + RING_ARRAYS / run.config.attention_parts
    return (arrays * queries + state) / tensor
