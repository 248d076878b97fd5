"""A problem that attention is measured on: its operands, its rates, its tiles.

Tiles are counted from the layouts and the tile ranges that drive the kernels' loops. A
partial tile counts in full, as it is computed in full.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import attention_with_lse, masks
from kernels.backends.tile_layout import BlockSizes
from kernels.backends.tile_ranges import key_ranges
from kernels.layouts import Layout, permute
from kernels.masks import Visible
from tools.lib.benchmarks.rows import Environment, peak_share

DOCUMENTS = 0.13, 0.31, 0.42, 0.77
"""Where documents begin after the first, as shares of the sequence."""

MASKS: dict[str, Callable[[int], masks.Mask]] = {
    "causal": lambda length: masks.causal(),
    "documents": lambda length: masks.documents(
        np.searchsorted(DOCUMENTS, np.arange(length) / length, "right").astype(np.int32)
    ),
    "full": lambda length: masks.full(),
}

GRADED = "out", "dq", "dk", "dv"
FLOPS_CONVENTION = (
    "visible pairs only; forward 4 * head_dim * heads * pairs, backward 2.5 times "
    "that, as FlashAttention counts"
)
FORWARDS = {"forward": 1.0, "backward": 2.5, "both": 3.5}
"""FLOPs of a run, in those of a forward run."""


class Operands(NamedTuple):
    """q and d_out (B, T, H, D), k and v (B, T, K, D), on the device."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array


@dataclass(frozen=True)
class Problem:
    """Self-attention over `length` tokens, on a ring of `ring_size` devices.

    Raises:
      ValueError: `heads` is not a multiple of `kv_heads`.
    """

    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    mask: str
    batch: int = 1
    ring_size: int = 1
    seed: int = 0

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads must be a multiple of --kv-heads {self.kv_heads}, got "
                f"{self.heads}"
            )

    @property
    def visible(self) -> Visible:
        """NumPy bounds (1, T) of the whole sequence, in natural order."""
        index = np.arange(self.length, dtype=np.int32)
        return MASKS[self.mask](self.length)(index, self.length)

    def draw(self) -> Operands:
        """Draws random operands from the seed."""
        keys = jax.random.split(jax.random.key(self.seed), 4)
        heads_of_each = self.heads, self.kv_heads, self.kv_heads, self.heads
        arrays = []
        for key, heads in zip(keys, heads_of_each, strict=True):
            shape = self.batch, self.length, heads, self.head_dim
            arrays.append(jax.random.normal(key, shape, self.dtype))
        return Operands._make(arrays)

    def rates(
        self, direction: str, seconds: float, environment: Environment
    ) -> dict[str, Any]:
        """Returns the rate of a run in a direction of `FORWARDS`."""
        pairs = self.batch * visible_pairs(self.visible)
        flops = FORWARDS[direction] * 4 * self.head_dim * self.heads * pairs
        share = peak_share(flops / seconds, environment, jnp.dtype(self.dtype))
        facts = {"tflops": flops / seconds / 1e12, "flops_convention": FLOPS_CONVENTION}
        return facts | {"peak_share": share}

    def truth(self, operands: Operands) -> dict[str, np.ndarray]:
        """Returns out, dq, dk and dv by the reference in float64."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            options = {"visible": self.visible, "implementation": "reference"}
            return attention_with_lse(q, k, v, **options)[0]

        with jax.enable_x64(True):
            q, k, v, d_out = jax.tree.map(jnp.float64, operands)
            out, pull = jax.vjp(jax.jit(attend), q, k, v)
            results = jax.device_get((out, *pull(d_out)))
        return dict(zip(GRADED, results, strict=True))


def relative_error(result: np.ndarray, truth: np.ndarray) -> float:
    """Returns the norm of the error relative to the norm of the truth."""
    return float(np.linalg.norm(result - truth) / np.linalg.norm(truth))


def bounds_of_steps(
    layout: Layout, ring_size: int, visible: Visible
) -> Iterator[tuple[tuple[int, int], list[np.ndarray]]]:
    """Yields each (device, step), and its bounds in the local slots of the step's keys.

    visible: NumPy bounds of the whole sequence, (B or 1, T), in natural order.

    Raises:
      ValueError: the sequence does not divide into the layout's shards.
    """
    k_start = np.split(permute(visible.k_start, layout, ring_size), ring_size, axis=1)
    k_end = np.split(permute(visible.k_end, layout, ring_size), ring_size, axis=1)
    length = visible.k_start.shape[1] // ring_size
    for device, step in np.ndindex(ring_size, ring_size):
        source = (device - step) % ring_size  # whose keys are visiting the device
        bounds = k_start[device], k_end[device]
        counts = [layout.count(source, x, ring_size, length) for x in bounds]
        yield (device, step), counts


def tiles_per_step(
    layout: Layout, ring_size: int, visible: Visible, sizes: BlockSizes
) -> np.ndarray:
    """Counts the tiles of each device in each ring step, int64 (devices, steps)."""
    length = visible.k_start.shape[1] // ring_size
    block_q = min(sizes.block_q, length)
    block_k = min(sizes.block_k, length)
    work = np.zeros((ring_size, ring_size), np.int64)
    for position, bounds in bounds_of_steps(layout, ring_size, visible):
        k_start, k_end = bounds
        work[position] = key_ranges(k_start, k_end, block_q, block_k).work().sum()
    return work


def visible_pairs(visible: Visible) -> int:
    """Counts the pairs of a query and a key that is visible to it."""
    return int((visible.k_end - visible.k_start).clip(0).sum(dtype=np.int64))


def count_tiles(
    layout: Layout, ring_size: int, visible: Visible, sizes: BlockSizes
) -> dict[str, Any]:
    """Returns the tiles of one head and one batch row, as fields of a row.

    tiles_critical_path: of the slowest device of each step, as all wait for it.
    tiles_bound: the visible pairs, spread evenly: no critical path is shorter.
    """
    work = tiles_per_step(layout, ring_size, visible, sizes)
    path = int(work.max(axis=0).sum())
    tile = sizes.block_q * sizes.block_k
    bound = visible_pairs(visible) / tile / ring_size
    counts = {"tiles_total": int(work.sum()), "tiles_critical_path": path}
    return counts | {"tiles_bound": bound, "bound_share": bound / path}
