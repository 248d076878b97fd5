"""Products of rows that are sorted by group, each group's with a matrix of its own.

Letters: m rows, X groups, I inputs and O outputs of the matrices.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

LANES = 128

ROWS = 256
"""Of a tile on a TPU's core; half of them on each of two. A tile with rows of two
groups is computed for both."""

MOST_COLUMNS = 1536
MATRIX = 3 << 19
GRADIENT = MATRIX // 2
"""Most columns of a tile on TPUs, and 16-bit numbers of a matrix in it, of which VMEM
holds two; numbers of a gradient, which it holds three times in float32."""


_FORWARD = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (1,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
_OF_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
_OF_WEIGHT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)
"""The product, and the gradients of both operands: what is summed over in each."""


def check_platform(platform: str) -> None:
    """Raises ValueError if devices of this platform have no grouped product."""
    if platform == "gpu" and importlib.util.find_spec("tokamax") is None:
        raise ValueError(
            "experts on GPUs must have tokamax, got none: XLA would multiply every "
            "token with all experts; install requirements/tokamax.txt"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_product(
    rows: jax.Array, weight: jax.Array, sizes: jax.Array, platform: str, cores: int = 1
) -> jax.Array:
    """Multiplies rows (m, I), sorted by group, with weight (X, I, O): (m, O), as rows.

    Inside a `shard_map` that does not check what varies, as its kernels do not say it.

    weight: in any type; its gradient is summed in that, and that of rows in theirs.
    sizes: int32 (X,), rows of each group. platform: "cpu", "gpu" or "tpu".
    cores: of a TPU's chip, that share a kernel's columns.
    """
    # Cast here, and not outside of a loop over chunks of tokens: their gradients then
    # add up in the weight's own float32.
    weight = weight.astype(rows.dtype)
    if cores > 1:
        return _tpu_product(rows, weight, sizes, cores)
    return _ragged_dot(platform)(rows, weight, sizes, _FORWARD)


def _forward(
    rows: jax.Array, weight: jax.Array, sizes: jax.Array, platform: str, cores: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return grouped_product(rows, weight, sizes, platform, cores), (rows, weight, sizes)


def _backward(
    platform: str,
    cores: int,
    residuals: tuple[jax.Array, jax.Array, jax.Array],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    rows, weight, sizes = residuals
    narrow = weight.astype(rows.dtype)
    ragged_dot = _ragged_dot(platform)
    if platform == "tpu":
        dx = _tpu_product(dy, narrow, sizes, cores, transposes=True)
    else:
        dx = ragged_dot(dy, narrow, sizes, _OF_ROWS)
    if cores > 1:
        dw = _tpu_gradient(rows, dy, sizes, cores)
        return dx, dw.astype(weight.dtype), None
    dw = ragged_dot(rows, dy, sizes, _OF_WEIGHT, preferred_element_type=weight.dtype)
    return dx, dw, None


grouped_product.defvjp(_forward, _backward)


def _ragged_dot(platform: str) -> Callable[..., jax.Array]:
    """Returns XLA's grouped product; for GPUs, where that is dense, tokamax's."""
    if platform != "gpu":
        return lax.ragged_dot_general
    tokamax = importlib.import_module("tokamax")
    return functools.partial(tokamax.ragged_dot_general, implementation="triton")


def _tpu_product(
    rows: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    cores: int,
    *,
    transposes: bool = False,
) -> jax.Array:
    """Multiplies rows (m, I) with weight (X, I, O): (m, O), as rows.

    In JAX's kernel, with our tiles: XLA's own has a weight copied that it reads
    transposed, and cuts columns into numbers of tiles that two cores cannot share.

    transposes: of rows (m, O) and weight (X, I, O) to (m, I).
    """
    inputs, outputs = weight.shape[1:]
    if transposes:
        inputs, outputs = outputs, inputs
    columns = _columns(outputs, cores)
    most = MATRIX * 2 // rows.dtype.itemsize // columns
    tiling = ROWS // cores, _inputs(inputs, most), columns
    padded = _whole_tiles(rows, tiling[0])
    y = gmm(padded, weight, sizes, rows.dtype, tiling, transpose_rhs=transposes)
    return y[: len(rows)]


def _tpu_gradient(
    rows: jax.Array, dy: jax.Array, sizes: jax.Array, cores: int
) -> jax.Array:
    """Sums the products of rows (m, I) and dy (m, O) by group: float32 (X, I, O)."""
    columns = _columns(dy.shape[1], cores)
    tiling = ROWS // cores, _inputs(rows.shape[1], GRADIENT // columns), columns
    transposed = _whole_tiles(rows, tiling[0]).swapaxes(0, 1)  # the kernel undoes it
    padded = _whole_tiles(dy, tiling[0])
    with jax.numpy_dtype_promotion("standard"):  # in which the kernel is written
        return tgmm(transposed, padded, sizes, jnp.float32, tiling)


def _whole_tiles(rows: jax.Array, tile: int) -> jax.Array:
    """Appends rows of 0, which are in no group, to fill a tile."""
    return jnp.pad(rows, ((0, -len(rows) % tile), (0, 0)))


def _columns(size: int, cores: int) -> int:
    """Returns the columns of a tile, of which all cores compute as many."""
    if size <= LANES:
        return size
    tiles = range(MOST_COLUMNS, 2 * LANES, -LANES)
    return min(tiles, key=lambda tile: -(-size // (cores * tile)) * tile)


def _inputs(size: int, most: int) -> int:
    """Returns the numbers that a tile sums over: all, or what fills up the last one."""
    if size <= max(most, LANES):
        return size
    most = most // LANES * LANES
    tiles = range(most, most // 2, -LANES)
    return min(tiles, key=lambda tile: -(-size // tile) * tile)
