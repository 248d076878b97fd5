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
