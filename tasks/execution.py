"""Settings of speed and memory of a config's model: what it says, the rest chosen."""

import dataclasses
import functools
import math

import jax.numpy as jnp
import ml_collections
from jax.sharding import AbstractMesh, Mesh

from models.memory import NEXT, Device, Execution, Kept, choose_chunk
from tasks.config_errors import names_fields
from tasks.systems import attention_system
from training import chips

COMPUTE_DTYPES = ("bfloat16", "float32")

KEEP_PRODUCTS = "products", "everything"
"""Policies that keep gate and up, if these are not made in chunks."""


@names_fields
def check_execution(config: ml_collections.ConfigDict) -> Execution:
    """Returns the settings that the config says, before anything is chosen.

    Raises:
      ValueError: an unsupported dtype, an unknown remat policy, or a budget beside one
        that has no next.
    """
    if config.compute_dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"{config.compute_dtype=} must be one of {', '.join(COMPUTE_DTYPES)}"
        )
    if not 0 <= config.remat_budget_gib < math.inf:
        raise ValueError(f"{config.remat_budget_gib=} must be a number, at least 0")
    if config.remat_budget_gib and config.remat not in (*NEXT, "products"):
        raise ValueError(
            f"{config.remat_budget_gib=} is for what layers keep beyond one of "
            f"{', '.join(NEXT)}, got {config.remat=}: set it to 0"
        )
    is_chunked = attention_system(config).chunked
    return Execution(
        compute_dtype=jnp.dtype(config.compute_dtype),
        remat=config.remat,
        feed_forward_chunk=config.feed_forward_chunk_tokens if is_chunked else 0,
        attention_parts=config.attention_parts,
        loss_chunk=config.loss_chunk_tokens,
    )


def chosen_execution(
    config: ml_collections.ConfigDict,
    kept: Kept,
    device: Device | None,
    vocab_size: int = 0,
) -> Execution:
    """Returns the settings with chunks and layers that keep more chosen.

    kept: counts the activations that the layers of a device keep.
    device: that it runs on; None if it is not known.
    vocab_size: of the logits; 0 for a model without.

    Raises:
      ValueError: as `check_execution`.
    """
    said, tensor = check_execution(config), kept.tensor
    choose = functools.partial(choose_chunk, kept.tokens, device=device)

    def keeping(policy: str) -> Execution:
        chunk, is_chunked = said.feed_forward_chunk, attention_system(config).chunked
        if chunk == 0 and is_chunked and policy not in KEEP_PRODUCTS:
            # Gate, up, their product, and the gradients of the three.
            width = 6 * kept.itemsize * config.model.feed_forward_size
            chunk = choose(token_bytes=width // tensor)
        return dataclasses.replace(said, remat=policy, feed_forward_chunk=chunk)

    budget = config.remat_budget_gib * 2**30
    (policy, _), *last = kept.climb(said.remat, budget)
    run = keeping(policy)
    if vocab_size and not said.loss_chunk:  # logits and their gradients, float32
        chunk = choose(token_bytes=8 * vocab_size // tensor)
        run = dataclasses.replace(run, loss_chunk=chunk)
    for policy, layers in last:
        run = dataclasses.replace(run, last_layers=(keeping(policy), layers))
    return run


def device_of(mesh: Mesh | AbstractMesh) -> Device | None:
    """Returns memory and rate of a mesh's devices; None where no chip is known."""
    if not isinstance(mesh, Mesh):
        return None
    chip = chips.find(mesh.devices.flat[0].device_kind)
    return chip and Device(chip.hbm_bytes, chip.peak_flops / chip.hbm_bytes_per_second)
