"""What the kernels of tokamax for Hopper and Blackwell take, without importing it."""

import importlib.metadata

import jax.numpy as jnp

TESTED = "0.0.17"
"""The version whose private modules `launch` calls."""

TYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
"""Types of operands that the kernels multiply."""

MAX_HEAD = 192
"""Heads of 256 do not compile: 262,244 bytes of shared memory, and 232,448 exist."""


def installed_version() -> str | None:
    """Returns the version of tokamax, or None."""
    try:
        return importlib.metadata.version("tokamax")
    except importlib.metadata.PackageNotFoundError:
        return None


def takes(dtype: jnp.dtype, head_dim: int) -> bool:
    """Returns whether the tested version is there, and has kernels for operands."""
    return dtype in TYPES and head_dim <= MAX_HEAD and installed_version() == TESTED
