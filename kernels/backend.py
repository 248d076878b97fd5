"""The implementations of one attention step, and the choice among them."""

import functools
import logging
from collections.abc import Callable
from typing import Protocol

import jax

from kernels import blockwise, pallas_tpu, reference


class Backend(Protocol):
    """One attention step and its gradients, as `reference` describes them."""

    forward: Callable
    backward: Callable


IMPLEMENTATIONS: dict[str, Backend] = {
    "reference": reference,
    "blockwise": blockwise,
    "pallas_tpu": pallas_tpu,
}


def choose(implementation: str | None) -> Backend:
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
    name = "pallas_tpu" if platform == "tpu" else "blockwise"
    logging.getLogger(__name__).info("attention on %s: %s", platform, name)
    return name
