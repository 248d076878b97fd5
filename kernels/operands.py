"""What the doors refuse before anything is computed."""

import jax
import jax.numpy as jnp

from kernels.masks import Visible


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
    if 0 in (*q.shape, *k.shape):
        raise ValueError(f"there is nothing to attend to: {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"batch and head size of q and k must agree, got {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key/value heads "
            f"evenly: make H a multiple of K ({shapes})"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}: cast "
            "them to the one that the matrix products should use"
        )
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q, k and v must be of a floating type, got {q.dtype}")


def checked_bounds(q: jax.Array, visible: Visible, num_keys: int) -> Visible:
    """Bounds as JAX arrays, clipped to the `num_keys` indices there are.

    Raises:
      ValueError: they are no integers, or not (B, T) or (1, T).
    """
    allowed = (q.shape[:2], (1, q.shape[1]))
    if visible.lo.shape not in allowed or visible.hi.shape != visible.lo.shape:
        raise ValueError(
            f"visible bounds must be (B, T) or (1, T) for {q.shape=}, got "
            f"{visible.lo.shape=} and {visible.hi.shape=}"
        )
    if not all(jnp.issubdtype(bound.dtype, jnp.integer) for bound in visible):
        raise ValueError(
            f"visible bounds must be integers, got {visible.lo.dtype} and "
            f"{visible.hi.dtype}"
        )
    return Visible(
        jnp.clip(visible.lo, 0, num_keys).astype(jnp.int32),
        jnp.clip(visible.hi, -1, num_keys - 1).astype(jnp.int32),
    )
