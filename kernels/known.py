"""Checks of arguments whose values are known while a program is traced."""

import operator

import jax
import numpy as np


def known(array: jax.Array | np.ndarray | int) -> np.ndarray | None:
    """Returns the values of an array, or None where they are not known, as under `jit`.

    Waits for an array that is still computed. Returns None for an array of which other
    processes hold a part.
    """
    if isinstance(array, jax.core.Tracer):
        return None
    is_here = getattr(array, "is_fully_addressable", True)
    return np.asarray(array) if is_here else None


def whole_number(name: str, value: int, least: int) -> int:
    """Checks a number of tokens, devices or the like, and returns it.

    Raises:
      ValueError: names the argument: `value` is not a whole number that is known while
        tracing, or is below `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # and where it is traced
        number = None
    if number is None:
        raise ValueError(
            f"{name} must be a whole number, and known while tracing, got {value!r:.60}"
        )
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number
