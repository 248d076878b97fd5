"""The attention systems that the papers compare, by name."""

from dataclasses import dataclass

import ml_collections

from kernels import layouts as layout
from kernels.layouts import Layout
from tasks.config_errors import names_fields


@dataclass(frozen=True)
class AttentionSystem:
    """One of the systems that the papers compare.

    layout: how the sequence is dealt out to the ring.
    sharded: whether there may be a ring of more than one device.
    implementation: that it is bound to; None for the config's.
    chunked: whether the feed-forward is computed in chunks.
    """

    layout: Layout
    sharded: bool
    implementation: str | None
    chunked: bool


@names_fields
def attention_system(config: ml_collections.ConfigDict) -> AttentionSystem:
    """The system that `config.attention` names.

    Raises:
      ValueError: there is no such system.
    """
    whole, striped = layout.Contiguous(), layout.Striped(config.stripe_granule)
    systems = {
        "vanilla": AttentionSystem(whole, False, "reference", chunked=False),
        "memory_efficient": AttentionSystem(whole, False, None, chunked=False),
        "blockwise": AttentionSystem(whole, False, None, chunked=True),
        "ring": AttentionSystem(whole, True, None, chunked=True),
        "striped": AttentionSystem(striped, True, None, chunked=True),
        "zigzag": AttentionSystem(layout.Zigzag(), True, None, chunked=True),
    }
    if config.attention not in systems:
        raise ValueError(f"{config.attention=} is not one of {', '.join(systems)}")
    return systems[config.attention]
