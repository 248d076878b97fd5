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

MOST_COLUMNS = 2048
"""Of a tile on TPUs."""

MATRICES = {128: 3 << 19, 256: 13 << 18}
GRADIENTS = {128: 3 << 18, 256: 3 << 19}
"""Most 16-bit numbers of a matrix in a tile on TPUs, of which VMEM holds two, and of a
gradient, which it holds three times in float32; by the side of a matrix unit. Chips
with the wider units let a kernel have 32 MiB, others 16."""

EDGE = 256
"""Cost of each input and column of a tile, in numbers of a matrix: to load them, and to
start the step. It keeps tiles from being narrow."""

Units = tuple[int, int]
"""Of a TPU: the cores that share a kernel's columns, and the side of a matrix unit."""

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
    rows: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    platform: str,
    units: Units | None = None,
) -> jax.Array:
    """Multiplies rows (m, I), sorted by group, with weight (X, I, O): (m, O), as rows.

    Inside a `shard_map` that does not check what varies, as its kernels do not say it.

    weight: in any type; its gradient is summed in that, and that of rows in theirs.
    sizes: int32 (X,), rows of each group. platform: "cpu", "gpu" or "tpu".
    units: of a TPU, for JAX's kernels; None for XLA's product, which XLA can shard.
    """
    # Cast here, and not outside of a loop over chunks of tokens: their gradients then
    # add up in the weight's own float32.
    weight = weight.astype(rows.dtype)
    if units is not None:
        return _tpu_product(rows, weight, sizes, units)
    return _ragged_dot(platform)(rows, weight, sizes, _FORWARD)


def _forward(
    rows: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    platform: str,
    units: Units | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return grouped_product(rows, weight, sizes, platform, units), (rows, weight, sizes)


def _backward(
    platform: str,
    units: Units | None,
    residuals: tuple[jax.Array, jax.Array, jax.Array],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    rows, weight, sizes = residuals
    narrow = weight.astype(rows.dtype)
    if units is not None:
        dx = _tpu_product(dy, narrow, sizes, units, transposes=True)
        dw = _tpu_gradient(rows, dy, sizes, units)
        return dx, dw.astype(weight.dtype), None
    ragged_dot = _ragged_dot(platform)
    dx = ragged_dot(dy, narrow, sizes, _OF_ROWS)
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
    units: Units,
    *,
    transposes: bool = False,
) -> jax.Array:
    """Multiplies rows (m, I) with weight (X, I, O): (m, O), as rows.

    In JAX's kernel, with our tiles. XLA's own is as fast in the same tiles, but takes
    others, in which a third of its columns may be empty or one of two cores idle, and
    has a weight copied that it reads transposed.

    transposes: of rows (m, O) and weight (X, I, O) to (m, I).
    """
    cores, side = units
    inputs, outputs = weight.shape[1:]
    if transposes:
        inputs, outputs = outputs, inputs
    most = MATRICES[side] * 2 // rows.dtype.itemsize
    tiling = ROWS // cores, *_matrix_tile(inputs, outputs, most, units)
    padded = _whole_tiles(rows, tiling[0])
    y = gmm(padded, weight, sizes, rows.dtype, tiling, transpose_rhs=transposes)
    return y[: len(rows)]


def _tpu_gradient(
    rows: jax.Array, dy: jax.Array, sizes: jax.Array, units: Units
) -> jax.Array:
    """Sums the products of rows (m, I) and dy (m, O) by group: float32 (X, I, O)."""
    cores, side = units
    tile = _matrix_tile(rows.shape[1], dy.shape[1], GRADIENTS[side], units)
    tiling = ROWS // cores, *tile
    transposed = _whole_tiles(rows, tiling[0]).swapaxes(0, 1)  # the kernel undoes it
    padded = _whole_tiles(dy, tiling[0])
    with jax.numpy_dtype_promotion("standard"):  # in which the kernel is written
        return tgmm(transposed, padded, sizes, jnp.float32, tiling)


def _whole_tiles(rows: jax.Array, tile: int) -> jax.Array:
    """Appends rows of 0, which are in no group, to fill a tile."""
    return jnp.pad(rows, ((0, -len(rows) % tile), (0, 0)))


def _matrix_tile(inputs: int, outputs: int, most: int, units: Units) -> tuple[int, int]:
    """Returns inputs and columns of the tiles that take a core the least time.

    Each core computes as many columns. most: numbers of a tile.
    """
    cores, side = units

    def cost(columns: int) -> int:
        tile = _inputs(inputs, most // columns)
        tiles = -(-inputs // tile) * -(-outputs // (cores * columns))
        return tiles * (tile * columns + EDGE * (tile + columns))

    if outputs <= LANES:
        columns = outputs
    else:
        columns = min(range(MOST_COLUMNS, 2 * LANES, -side), key=cost)
    return _inputs(inputs, most // columns), columns


def _inputs(size: int, most: int) -> int:
    """Returns the numbers that a tile sums over: all, or what fills up the last one."""
    if size <= max(most, LANES):
        return size
    most = most // LANES * LANES
    tiles = range(most, most // 2, -LANES)
    return min(tiles, key=lambda tile: -(-size // tile) * tile)
