"""Backends: implementations of one attention step, and the choice among them."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ..devices.device import device_kind, is_blackwell, is_hopper
from . import blockwise, reference, tokamax_gpu

TESTED_JAX = "0.11.2"
"""With which the kernels of every chip were compiled and tested; Pallas changes."""


class Backend(Protocol):
    """One attention step and its gradients, as `reference` documents them."""

    @property
    def forward(self) -> Callable: ...

    @property
    def backward(self) -> Callable: ...


class _Implementations(Mapping[str, Backend]):
    """Backends by name; the kernels of a chip are imported when they are taken."""

    anywhere: dict[str, Backend] = {"reference": reference, "blockwise": blockwise}
    chips: dict[str, tuple[str, dict[str, Any]]] = {
        "pallas_tpu": ("tpu", {}),
        "hopper": ("hopper", {}),
        "hopper_deterministic": ("hopper", {"is_deterministic": True}),
        "triton": ("triton_gpu", {}),
        "tokamax": ("tokamax_gpu", {}),
    }
    """Folder of the kernels, and what is special to their launch."""

    def __getitem__(self, name: str) -> Backend:
        return self.anywhere[name] if name in self.anywhere else _of_chip(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*self.anywhere, *self.chips))

    def __len__(self) -> int:
        return len(self.anywhere) + len(self.chips)


@functools.cache  # so that it is logged once
def _of_chip(name: str) -> Backend:
    folder, options = _Implementations.chips[name]
    tested = f"the kernels of {name} were tested with jax {TESTED_JAX}"
    try:
        kernels = importlib.import_module(f".{folder}.launch", __name__)
    except (ImportError, AttributeError) as problem:
        raise NotImplementedError(
            f"{tested}, and cannot be imported with {jax.__version__} ({problem}): "
            f"install jax {TESTED_JAX}, or take implementation='blockwise'"
        ) from problem
    if jax.__version__ != TESTED_JAX:
        logging.getLogger(__name__).warning("%s, this is %s", tested, jax.__version__)
    return kernels.Launch(**options)


IMPLEMENTATIONS = _Implementations()


def check_implementation(implementation: str | Backend | None) -> None:
    """Refuses an argument of `choose` that is unknown."""
    is_backend = hasattr(implementation, "forward") and hasattr(
        implementation, "backward"
    )
    if not (implementation is None or is_backend or implementation in IMPLEMENTATIONS):
        raise ValueError(
            f"{implementation=} is not one of {', '.join(IMPLEMENTATIONS)}"
        )


def choose(
    implementation: str | Backend | None, dtype: jnp.dtype, head_dim: int
) -> Backend:
    """Returns the backend of a name, or the best one for operands and this device.

    implementation: a key of `IMPLEMENTATIONS`, a backend itself, or None for the best.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: this jax cannot import its kernels.
    """
    check_implementation(implementation)
    if implementation is None:
        implementation = _best(device_kind(), jnp.dtype(dtype), head_dim)
    if isinstance(implementation, str):
        return IMPLEMENTATIONS[implementation]
    return implementation


@functools.cache  # so that the choice is logged once
def _best(kind: str, dtype: jnp.dtype, head_dim: int) -> str:
    name = "blockwise"
    if kind.startswith("TPU"):
        name = "pallas_tpu" if _jax_knows_tpu() else name
    # Hopper's kernels take 16 bits alone: a WGMMA would round float32 to 19.
    elif is_hopper(kind) and dtype.itemsize == 2:
        name = "hopper"
    elif is_blackwell(kind) and tokamax_gpu.takes(dtype, head_dim):
        name = "tokamax"
    elif kind.startswith("NVIDIA") and importlib.util.find_spec("jax_triton"):
        name = "triton"
    logging.getLogger(__name__).info("attention on %s in %s: %s", kind, dtype, name)
    return name


def _jax_knows_tpu() -> bool:
    """Returns whether jax has this TPU's sizes, by which kernels are cut."""
    try:
        importlib.import_module("jax.experimental.pallas.tpu").get_tpu_info()
    except ValueError:
        return False
    return True
