"""The gated delta rule on a TPU: a chunk, and the walk over chunks, in one kernel.

Letters of shapes: N rows, K key heads, H value heads, G value heads of a program, which
read one key head, C tokens of a chunk, D and V sizes of keys and values, W columns of a
state: V, or V + D where the map of the state is carried beside it.
"""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ...devices.device import device_kind

SIZES = 64, 128, 256
"""Of keys and values, that the kernels take."""
CHUNK = 128
"""Tokens of a chunk."""
KINDS = "TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x"
"""Chips for which the kernels were compiled, as `jax.Device.device_kind`."""


def best(keys: tuple[int, ...], values: int, dtype: jnp.dtype) -> Callable | None:
    """Returns `launch.gated_delta` where it is made for a problem and this device.

    keys: shape of keys (…, T, K, D). values: V. dtype: of both, and of the result.
    """
    return _best(device_kind(), keys[-3], keys[-1], values, jnp.dtype(dtype))


@functools.cache  # so that the choice is logged once
def _best(
    kind: str, tokens: int, depth: int, values: int, dtype: jnp.dtype
) -> Callable | None:
    rule: Any = None
    is_known = kind in KINDS and dtype in (jnp.bfloat16, jnp.float32)
    # Shorter runs are padded to a chunk: most of it would be padding.
    if is_known and depth in SIZES and values in SIZES and tokens >= CHUNK // 2:
        rule = importlib.import_module(".launch", __name__).gated_delta
    logging.getLogger(__name__).info(
        "gated delta rule on %s in %s, keys of %d and values of %d, runs of %d: %s",
        *(kind, dtype, depth, values, tokens, "pallas_tpu" if rule else "xla"),
    )
    return rule
