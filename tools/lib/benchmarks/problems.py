"""A problem that attention is measured on: its operands and its rates."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels import attention_with_lse, masks
from tools.lib.benchmarks.rows import Environment, peak_share
from tools.lib.benchmarks.work import visible_pairs

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
    seed: int = field(default_factory=lambda: secrets.randbits(31))

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads must be a multiple of --kv-heads {self.kv_heads}, got "
                f"{self.heads}"
            )

    @property
    def visible(self) -> masks.Visible:
        """NumPy bounds (1, T) of the whole sequence, in natural order."""
        index = np.arange(self.length, dtype=np.int32)
        return MASKS[self.mask](self.length)(index, self.length)

    def draw(self) -> Operands:
        """Draws random operands from the seed."""
        keys = jax.random.split(jax.random.key(self.seed), 4)
        heads = self.heads, self.kv_heads, self.kv_heads, self.heads
        shapes = [(self.batch, self.length, h, self.head_dim) for h in heads]
        pairs = zip(keys, shapes, strict=True)
        return Operands(*(jax.random.normal(*pair, self.dtype) for pair in pairs))

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
            q, k, v, d_out = (jnp.asarray(x, jnp.float64) for x in operands)
            out, pull = jax.vjp(jax.jit(attend), q, k, v)
            results = jax.device_get((out, *pull(d_out)))
        return dict(zip(GRADED, results, strict=True))


def relative_error(found: np.ndarray, truth: np.ndarray) -> float:
    """Returns the norm of the error relative to the norm of the truth."""
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
