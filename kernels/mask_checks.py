"""Checks of what masks are made of: lengths, ids and query indices."""

import jax
import jax.numpy as jnp
import numpy as np

from .known import known, whole_number

Array = jax.Array | np.ndarray


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
