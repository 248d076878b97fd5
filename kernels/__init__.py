"""Ring and Striped Attention in JAX; installed, this folder is the package `annulus`.

from annulus import Striped, causal, make_ring_attention, permute
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .checks import check_increasing
from .devices.compiler import compiler_options
from .layouts import (
    Contiguous,
    Layout,
    Mirror,
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
    "Mirror",
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


class _Package(ModuleType):
    """Keeps a function's name from the submodule that has the same name.

    Python sets `package.ring_attention` to the file whenever anything imports it, so
    without this the order of two imports decides whether the function can be called.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LAZY and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
