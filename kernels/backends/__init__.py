"""Backends: implementations of one attention step, and the choice among them."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import jax.numpy as jnp

from ..device import device_kind
from . import blockwise, reference
from .hopper import launch as hopper_launch
from .tpu import launch as tpu_launch
from .triton_gpu import launch as triton_launch


class Backend(Protocol):
    """One attention step and its gradients, as `reference` documents them."""

    @property
    def forward(self) -> Callable: ...

    @property
    def backward(self) -> Callable: ...


IMPLEMENTATIONS: Mapping[str, Backend] = {
    "reference": reference,
    "blockwise": blockwise,
    "pallas_tpu": tpu_launch.Launch(),
    "hopper": hopper_launch.Launch(),
    "hopper_deterministic": hopper_launch.Launch(is_deterministic=True),
    "triton": triton_launch.Launch(),
}


def check_implementation(implementation: str | Backend | None) -> None:
    """Refuses an argument of `choose` that is unknown."""
    is_backend = hasattr(implementation, "forward") and hasattr(
        implementation, "backward"
    )
    if not (implementation is None or is_backend or implementation in IMPLEMENTATIONS):
        raise ValueError(
            f"{implementation=} is not one of {', '.join(IMPLEMENTATIONS)}"
        )


def choose(implementation: str | Backend | None, dtype: jnp.dtype) -> Backend:
    """Returns the backend of a name, or the best one for this type and device.

    implementation: a key of `IMPLEMENTATIONS`, a backend itself, or None for the best.

    Raises:
      ValueError: the implementation is unknown.
    """
    check_implementation(implementation)
    if implementation is None:
        implementation = _best(device_kind(), jnp.dtype(dtype))
    if isinstance(implementation, str):
        return IMPLEMENTATIONS[implementation]
    return implementation


@functools.cache  # so that the choice is logged once
def _best(kind: str, dtype: jnp.dtype) -> str:
    name = "blockwise"
    if kind.startswith("TPU"):
        name = "pallas_tpu"
    elif hopper_launch.HOPPER.match(kind) and dtype in hopper_launch.TYPES:
        name = "hopper"
    elif kind.startswith("NVIDIA") and importlib.util.find_spec("jax_triton"):
        name = "triton"
    logging.getLogger(__name__).info("attention on %s in %s: %s", kind, dtype, name)
    return name
