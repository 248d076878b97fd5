"""Rows of a batch: how long they are, and how they lie on the mesh."""

import ml_collections
from jax.sharding import NamedSharding

from kernels import layouts
from kernels.layouts import padded_length
from tasks.base import attention_system
from tasks.config_errors import raise_all
from training.mesh import Partition


def batch_shape(
    config: ml_collections.ConfigDict, partition: Partition
) -> tuple[int, int]:
    """Returns rows of the global batch, and slots of each.

    Its `config.data.context_tokens`, and padding up to what the layout can shard.
    """
    layout, tokens = attention_system(config).layout, config.data.context_tokens
    parts = row_parts(config, partition), tokens, partition.slices
    return config.data.batch_rows, padded_length(layout, *parts)


def row_parts(config: ml_collections.ConfigDict, partition: Partition) -> int:
    """Returns how many parts a row has: shards, or their halves where remat is tail."""
    return partition.ring_size * (2 if config.remat == "tail" else 1)


def describe_padding(config: ml_collections.ConfigDict, partition: Partition) -> str:
    """Returns a line on what padding costs; "" where there is none."""
    tokens, (_, slots) = config.data.context_tokens, batch_shape(config, partition)
    if slots == tokens:
        return ""
    layout, ring = attention_system(config).layout, partition.ring_size
    slices = f" in {partition.slices} slices each" if partition.slices > 1 else ""
    return (
        f"rows: of {tokens:,} tokens, padded to {slots:,} for {layout} on a ring of "
        f"{ring}{slices}: {1 - tokens / slots:.2%} of their slots are empty"
    )


def batch_sharding(
    config: ml_collections.ConfigDict, partition: Partition
) -> NamedSharding:
    """Returns the sharding of token arrays, [B, T].

    Raises:
      ValueError: the rows of a microbatch do not divide over the mesh, or remat is of
        tails that the layout does not have.
    """
    raise_all(
        [
            lambda: _check_rows(config, partition),
            lambda: _check_tail(config, partition),
        ]
    )
    return partition.sharding(("batch", "sequence"), batch_shape(config, partition))


def _check_rows(config: ml_collections.ConfigDict, partition: Partition) -> None:
    rows = config.data.batch_rows
    if config.train.microbatches < 1:
        raise ValueError(f"{config.train.microbatches=} must be at least 1")
    parts = config.train.microbatches * partition.shards("batch")
    if rows < 1 or rows % parts:
        raise ValueError(
            f"{config.data.batch_rows=} does not divide into "
            f"{config.train.microbatches=} over the mesh's data and fsdp axes: make it "
            f"a multiple of {parts}, the next is {max(1, -(-rows // parts)) * parts}"
        )


def _check_tail(config: ml_collections.ConfigDict, partition: Partition) -> None:
    layout, ring = attention_system(config).layout, partition.ring_size
    # First halves in zigzag are a contiguous ring, which takes half of the time of all.
    if config.remat == "tail" and ring > 1 and not isinstance(layout, layouts.Striped):
        raise ValueError(
            f"{config.remat=} needs a ring of 1, or stripes, got {layout} on {ring}: "
            "set config.attention=striped, or config.remat=attention"
        )
