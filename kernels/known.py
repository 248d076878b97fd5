"""Checks of numbers and of masks' arguments, where values are known while tracing."""

import operator

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


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


def check_signed(name: str, array: Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.signedinteger):
        raise ValueError(f"{name} must be signed integers, got {array.dtype}")


def checked_length(name: str, length: int | Array) -> int | Array:
    """Returns one number, or (B, 1) of them, and checks them where they are known."""
    if not isinstance(length, Array):
        return whole_number(name, length, 0)
    check_signed(name, length)
    if length.ndim and length.shape[1:] != (1,):
        raise ValueError(
            f"{name} must be one number, or (B, 1) for one in each row, got "
            f"{length.shape}: give (B,) as lengths[:, None]"
        )
    values = known(length)
    if values is not None and values.size:
        whole_number(name, int(values.min()), 0)
    return length


def check_covered(index: Array, keys: int, ids: int | None = None) -> None:
    """Refuses negative indices, and fewer ids than tokens."""
    tokens, values = max(keys, index.shape[1]), known(index)
    if values is not None and values.size:
        whole_number("the first query index", int(values.min()), 0)
        tokens = max(tokens, int(values.max()) + 1)
    if ids is not None and tokens > ids:
        raise ValueError(
            f"document ids must cover the sequence of {tokens} tokens, got {ids} ids: "
            "give every token one, padding that of the last document"
        )


def checked_ids(ids: Array) -> Array:
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"document ids must be (T,) or (B, T), got {ids.shape=}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"document ids must be integers, got {ids.dtype}")
    values = known(ids)
    if values is not None:
        values = np.atleast_2d(values)
        rows, places = np.nonzero(values[:, 1:] < values[:, :-1])
        if rows.size:
            row, place = int(rows[0]), int(places[0])
            raise ValueError(
                f"document ids must not decrease: row {row} has "
                f"{values[row, place]} at {place} and {values[row, place + 1]} after "
                "it; number the documents of a row in the order in which they come"
            )
    return ids[None] if ids.ndim == 1 else ids
