"""Ring and Striped Attention in JAX; installed, this folder is the package `annulus`.

from annulus import Striped, causal, make_ring_attention, permute
"""

import importlib
from typing import TYPE_CHECKING, Any

from .checks import check_increasing
from .devices.compiler import compiler_options
from .layouts import (
    Contiguous,
    Layout,
    Striped,
    Zigzag,
    padded_length,
    permute,
    unpermute,
)
from .masks import (
    Mask,
    Visible,
    causal,
    documents,
    first,
    full,
    padding,
    prefix,
    segments,
    window,
)
from .trees import tree

if TYPE_CHECKING:
    from .attention import attention, attention_with_lse
    from .batches import Batch, shard_batch
    from .cost.choice import choose_layout
    from .decode_attention import CachedAttention
    from .devices.slices import ring_devices
    from .ring_attention import make_ring_attention, ring_attention

__all__ = [
    "Batch",
    "CachedAttention",
    "Contiguous",
    "Layout",
    "Mask",
    "Striped",
    "Visible",
    "Zigzag",
    "attention",
    "attention_with_lse",
    "causal",
    "check_increasing",
    "choose_layout",
    "compiler_options",
    "documents",
    "first",
    "full",
    "make_ring_attention",
    "padded_length",
    "padding",
    "permute",
    "prefix",
    "ring_attention",
    "ring_devices",
    "segments",
    "shard_batch",
    "tree",
    "unpermute",
    "window",
]

# Imported when they are first used: data workers need masks and layouts, not Pallas.
_LAZY = {
    "Batch": ".batches",
    "CachedAttention": ".decode_attention",
    "choose_layout": ".cost.choice",
    "attention": ".attention",
    "attention_with_lse": ".attention",
    "make_ring_attention": ".ring_attention",
    "ring_attention": ".ring_attention",
    "ring_devices": ".devices.slices",
    "shard_batch": ".batches",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _LAZY[name]
    module = importlib.import_module(home, __name__)
    # All of its names, or the submodule `ring_attention` stands for the function.
    globals().update({n: getattr(module, n) for n in _LAZY if _LAZY[n] == home})
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
