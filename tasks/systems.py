"""What a config says: attention system, mask, mesh, and how its model is run."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from data.document_mask import DocumentMask
from kernels import layouts, masks
from kernels.devices import chips
from kernels.layouts import Layout
from kernels.masks import Mask, Visible
from models.chunks import Device, choose_chunk, feed_forward_bytes
from models.flops import num_layer_matrices
from models.memory import KEEP_PRODUCTS, NEXT, REMAT_POLICIES, Execution, Kept
from models.sizes import WINDOW, DecoderConfig
from tasks.config_errors import names_fields
from training.sharding.mesh import MeshShape, Partition, make_mesh
from training.sharding.overlap import permutes_hide

AUTO = "auto"
"""The attention whose layout is chosen (see `layout_choice`): of text, in a ring. And
the remat that is chosen (see `memory_choice`)."""

DEFAULT_REMAT = "attention"
"""The remat of a run for which none is chosen, though it is left open."""

COMPUTE_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class AttentionSystem:
    """One of the systems that the papers compare.

    layout: how the sequence is distributed over the ring.
    sharded: whether there may be a ring of more than one device.
    implementation: the kernel it requires; None for the config's.
    chunked: whether the feed-forward is computed in chunks.
    """

    layout: Layout
    sharded: bool
    implementation: str | None
    chunked: bool


@names_fields
def attention_system(config: ConfigDict, granule: int = 1) -> AttentionSystem:
    """Returns the system that `config.attention` names.

    granule: of stripes, where the config names none.

    Raises:
      ValueError: the system is unknown.
    """
    whole = layouts.Contiguous()
    striped = layouts.Striped(config.stripe_granule or granule)
    systems = {
        "vanilla": AttentionSystem(whole, False, "reference", chunked=False),
        "memory_efficient": AttentionSystem(whole, False, None, chunked=False),
        "blockwise": AttentionSystem(whole, False, None, chunked=True),
        "ring": AttentionSystem(whole, True, None, chunked=True),
        "striped": AttentionSystem(striped, True, None, chunked=True),
        "zigzag": AttentionSystem(layouts.Zigzag(), True, None, chunked=True),
        "mirror": AttentionSystem(layouts.Mirror(), True, None, chunked=True),
        AUTO: AttentionSystem(striped, True, None, chunked=True),
    }
    if config.attention not in systems:
        raise ValueError(f"{config.attention=} must be one of {', '.join(systems)}")
    return systems[config.attention]


def prepare_devices(config: ConfigDict) -> None:
    """Makes this process simulate CPU devices, if the config asks for them.

    And JAX take what plans count on of a GPU's memory, unless the environment says how
    much: by default it takes 0.75.

    Raises:
      RuntimeError: JAX has devices already.
    """
    if config.simulated_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.simulated_devices)
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the older name
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.95")


@names_fields
def mesh_shape(config: ConfigDict, devices: int) -> MeshShape:
    """Returns the axes of a mesh of this many devices.

    Raises:
      ValueError: the axes do not match the devices, or there is a ring that the
        attention system cannot use; the message lists every field to change.
    """
    shape = MeshShape(**config.mesh).fill(devices)
    sharding = shape.ring * shape.ulysses
    if sharding > 1 and not attention_system(config).sharded:
        fsdp = shape.fsdp * sharding  # their devices shard the batch instead
        parts = config.train.microbatches * shape.data * fsdp
        rows = -(-config.data.batch_rows // max(parts, 1)) * parts
        change = {"mesh.ulysses": 1} if shape.ulysses > 1 else {}
        change |= {"mesh.ring": 1, "mesh.fsdp": fsdp}
        change |= {"data.batch_rows": rows} if rows != config.data.batch_rows else {}
        ulysses = f" and ulysses of {shape.ulysses}" if shape.ulysses > 1 else ""
        raise ValueError(
            f"{config.attention=} does not shard the sequence, but the mesh has a ring "
            f"of {shape.ring}{ulysses}: set "
            + ", ".join(f"config.{name}={value}" for name, value in change.items())
            + ", or config.attention=striped"
        )
    return shape.cut_ring(config.model.hidden_size)


def partition(config: ConfigDict, devices: Sequence[jax.Device]) -> Partition:
    """Returns the partition over the devices to run on or compile for.

    Raises:
      ValueError: as `mesh_shape`.
    """
    mesh = make_mesh(mesh_shape(config, len(devices)), devices)
    shards = len(devices) // mesh.shape["tensor"]
    tokens = config.data.batch_rows * config.data.context_tokens
    tokens //= shards * max(1, config.train.microbatches)
    chip = chips.find(devices[0].device_kind)
    return Partition(mesh, config.overlap_parameters and permutes_hide(chip, tokens))


@names_fields
def document_mask(config: ConfigDict) -> DocumentMask:
    """Returns which tokens of its document a token sees, in layers without windows.

    Raises:
      ValueError: the mask is unknown, or it does not go with other fields.
    """
    mask = DocumentMask.parse(config.mask)
    if config.task == "exorl" and mask != DocumentMask():
        raise ValueError(
            f"{config.mask=} is not for agents, which see their whole chain: set it to "
            '"causal"'
        )
    if not mask.prefix:
        return mask
    if mask.prefix >= config.data.context_tokens:
        raise ValueError(
            f"{config.mask=} leaves no token with a loss: its prefix must be below "
            f"{config.data.context_tokens=}"
        )
    if set(config.model.layer_pattern.lower()) == {WINDOW}:
        raise ValueError(
            f"{config.mask=} would show nothing ahead, as every layer has a window "
            f'({config.model.layer_pattern=}): set it to "causal"'
        )
    return mask


def limited(attend: Callable[..., jax.Array], shown: Mask) -> Callable[..., jax.Array]:
    """Returns an attention that shows the run's data no more than its mask does.

    attend: as of `make_ring_attention`. shown: by the run's mask, to rows of its data;
      a mask that is given in place of their bounds stands for itself.
    """

    def attend_within(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        visible: Mask | Visible,
        window: int | None = None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        within = shown if isinstance(visible, Visible) else masks.full()
        if window is not None:
            within &= masks.window(window)
        return attend(q, k, v, visible, sinks=sinks, within=within)

    return attend_within


def count_kept(
    sizes: DecoderConfig, partition: Partition, tokens: int, execution: Execution
) -> Kept:
    """Counts the activations that the layers of a device keep. tokens: of a device."""
    itemsize = execution.compute_dtype.itemsize
    tensor = partition.mesh.shape["tensor"]
    gathered = num_layer_matrices(sizes) * itemsize // (sizes.num_layers * tensor)
    shards = partition.shards(partition.mesh_axes("embed", sizes.hidden_size))
    return Kept(
        sizes=sizes,
        tokens=tokens,
        tensor=tensor,
        itemsize=itemsize,
        feed_forward_chunk=execution.feed_forward_chunk,
        gathered=gathered if shards > 1 else 0,
    )


@names_fields
def check_execution(config: ConfigDict) -> Execution:
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
    if config.remat not in (AUTO, *REMAT_POLICIES):
        known = ", ".join((AUTO, *REMAT_POLICIES))
        raise ValueError(f"{config.remat=} must be one of {known}")
    is_chunked = attention_system(config).chunked
    execution = Execution(
        compute_dtype=jnp.dtype(config.compute_dtype),
        remat=DEFAULT_REMAT if config.remat == AUTO else config.remat,
        feed_forward_chunk=config.feed_forward_chunk_tokens if is_chunked else 0,
        attention_parts=config.attention_parts,
        loss_chunk=config.loss_chunk_tokens,
    )
    if config.remat_budget_gib and config.remat not in NEXT:
        raise ValueError(
            f"{config.remat_budget_gib=} is for what layers keep beyond one of "
            f"{', '.join(NEXT)}, got {config.remat=}: set it to 0"
        )
    return execution


def chosen_execution(
    config: ConfigDict,
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
    execution = check_execution(config)
    choose = functools.partial(choose_chunk, kept.tokens, device=device)

    def keeping(policy: str) -> Execution:
        chunk = execution.feed_forward_chunk
        is_chunked = attention_system(config).chunked
        if chunk == 0 and is_chunked and policy not in KEEP_PRODUCTS:
            sizes = config.model
            size = feed_forward_bytes(sizes, kept.itemsize)
            moved = max(1, sizes.experts) / max(1, sizes.experts_per_token)
            chunk = choose(token_bytes=size // kept.tensor, weights=moved)
        return dataclasses.replace(execution, remat=policy, feed_forward_chunk=chunk)

    budget = config.remat_budget_gib * 2**30
    (policy, _), *last = kept.climb(execution.remat, budget)
    run = keeping(policy)
    if vocab_size and not execution.loss_chunk:  # logits, their gradients, float32
        chunk = choose(token_bytes=8 * vocab_size // kept.tensor)
        run = dataclasses.replace(run, loss_chunk=chunk)
    for policy, layers in last:
        run = dataclasses.replace(run, last_layers=(keeping(policy), layers))
    return run


def device_of(kind: str) -> Device | None:
    """Returns memory and rate of a kind of device; None where no chip is known."""
    chip = chips.find(kind)
    if chip is None:
        return None
    return Device(chip.hbm_bytes, chip.peak_flops / chip.hbm_bytes_per_second)
