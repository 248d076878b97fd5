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

SPARE_SHARE = 0.05
"""Share of a chip's memory that a step should leave free for the runtime."""

MARGIN = 0.15
"""Share of it that stays free, by estimate, where layers keep more than by default.

Compiled steps took up to 9 % of the memory more than estimated
(results/2026-11-29-spare-memory.md)."""

LEAST = "nothing"
"""What layers keep where there is no room for the default."""

LAYER_ARRAYS = 6
"""float32 arrays of the hidden states' size: the most in compiled steps on TPUs."""

RING_ARRAYS = 7
"""And of that of the queries of one head group."""


def settled(run: Run, before: ConfigDict | None = None) -> Run:
    """Returns a run with `remat` and `remat_budget_gib` in the place of remat=auto.

    From the last layer on, layers keep more than by default while MARGIN is left. Where
    the default itself does not fit they begin with less, and where the memory of the
    run's devices is unknown they keep the default.

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
    least = keeping(run, DEFAULT_REMAT)
    if estimated_bytes(least) > (1 - SPARE_SHARE) * chip.hbm_bytes:
        least = keeping(run, LEAST)
    budget = (1 - MARGIN) * chip.hbm_bytes - estimated_bytes(least)
    # What the layers of a loop's round keep is there twice in their backward.
    budget /= 1 + len(run.sizes.period) / run.sizes.num_layers
    (policy, _), *last = least.kept.climb(least.config.remat, max(0.0, budget))
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


def flags(config: ConfigDict) -> str:
    """Returns the flags that name what a config's layers keep."""
    text = f"--config.remat={config.remat}"
    if config.remat_budget_gib:
        text += f" --config.remat_budget_gib={config.remat_budget_gib}"
    return text


def choice_line(run: Run) -> str:
    """Returns a line on what remat=auto is in a run."""
    line = f"remat: auto is {flags(run.config)}"
    if (chip := chips.find(run.device_kind)) is None:
        return f"{line}, as the memory of {run.device_kind} is not known"
    used = estimated_bytes(run) / 2**30
    return f"{line}, {used:.3g} of {chip.hbm_bytes / 2**30:.3g} GiB by estimate"


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

    The gradients; and what is there at the fuller of two times. In the backward of a
    loop's round, which has a layer of each kind, their parameters in the compute type
    and their gradients in float32, whole, what they have saved, and the buffers of a
    layer and its ring. In that of the loss the logits of a chunk and their gradients,
    and the gradients of embedding and head.
    """
    model = run.sizes
    tensor = run.partition.mesh.shape["tensor"]
    hidden = run.local_tokens * model.hidden_size * 4
    queries = run.local_tokens * model.num_heads * model.head_dim * 4
    vocab = getattr(model, "vocab_size", 0)
    tables = vocab * model.hidden_size
    tables *= 1 if run.config.model.tied_embeddings else 2
    # Of layers with experts, where the first ones have none and are smaller.
    dense = sum(map(math.prod, model.of_layers[0].matrix_sides().values()))
    dense *= model.dense_layers
    of_experts = model.num_layers - model.dense_layers
    layer = (run.num_parameters - tables - dense) / of_experts
    state = (run.compute_dtype.itemsize + 4) * layer / tensor
    in_round = len(model.period) * (state + saved_bytes(run) / model.num_layers)
    ring = RING_ARRAYS / run.config.attention_parts * queries / tensor
    of_layers = in_round + LAYER_ARRAYS * hidden + ring
    of_loss = (4 * tables + 8 * vocab * run.execution.loss_chunk) / tensor
    return device_bytes(run.state_like.params) + max(of_layers, of_loss)
