"""The implementations of one attention step, and the choice among them."""

import functools
import logging
from types import ModuleType

import jax

from kernels import blockwise, reference

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "reference": reference,
    "blockwise": blockwise,
}
"""Modules with `forward` and `backward`, as described in `reference`."""


def choose(implementation: str | None) -> ModuleType:
    """The named implementation, or the best one for this process's devices.

    Raises:
      ValueError: there is none of that name.
    """
    if implementation is None:
        implementation = _best(jax.default_backend())
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{implementation=} is not one of {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation]


@functools.cache  # so that the choice is logged once
def _best(platform: str) -> str:
    name = "blockwise"
    logging.getLogger(__name__).info("attention on %s: %s", platform, name)
    return name


def check_operands(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Refuses operands that are no attention problem.

    Raises:
      ValueError: says which of (B, T, H, D), (B, S, K, D), (B, S, K, D) is broken.
    """
    shapes = f"{q.shape=}, {k.shape=}, {v.shape=}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k and v must be (B, T, H, D), got {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"batch and head size of q and k must agree, got {shapes}")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads "
            f"evenly: make H a multiple of K ({shapes})"
        )
    if 0 in (q.shape[1], k.shape[1], q.shape[3]):
        raise ValueError(f"there is nothing to attend to: {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}: cast "
            "them to the one that the matrix products should use"
        )
