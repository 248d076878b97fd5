"""The Pallas TPU kernels where there is no TPU: Pallas runs their steps on the CPU.

Here are also the attention steps that tests give to them, as rings do.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from kernels import pallas_tpu, reference
from kernels.backend import Backend
from kernels.block_sizes import BlockSizes, TpuBlocks
from kernels.merge import Partial
from kernels.pallas_tpu import Launch
from kernels.product import accumulator_type
from tests.cases import QUICK, Answer

CHIP = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5E, 1)

# Short problems have several tiles, and each of these sub-blocks, pieces and granules.
SMALL_BLOCKS = TpuBlocks(
    stacked_rows=256,
    block_k=256,
    rows=128,
    columns=128,
    ahead=1,
    behind=1,
    exact_rows=128,
    live_columns=128,
)

SMALL_VMEM = 3 * 2**20
"""Bytes that hold a step in these blocks, but no dq of several tiles."""


@dataclass(frozen=True)
class SimulatedTpu:
    """The backend `pallas_tpu`, its kernels launched as told."""

    launch: Launch = Launch(CHIP, SMALL_BLOCKS, interpret=True)

    def forward(self, *operands, **options):
        return pallas_tpu.forward(*operands, **options, launch=self.launch)

    def backward(self, *operands, **options):
        return pallas_tpu.backward(*operands, **options, launch=self.launch)

    def with_vmem(self, capacity: int) -> "SimulatedTpu":
        """The same on a chip with so many bytes of vector memory."""
        chip = dataclasses.replace(self.launch.chip, vmem_capacity_bytes=capacity)
        return SimulatedTpu(dataclasses.replace(self.launch, chip=chip))


class Step(NamedTuple):
    """What one attention step is given, forward and backward: see `reference`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    d_out: np.ndarray
    delta: np.ndarray
    dq: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    carry: Partial | None

    def astype(self, dtype: jnp.dtype) -> "Step":
        """Operands of products in a type, and sums in the one they are added up in."""
        wide = accumulator_type(dtype)
        types = dict.fromkeys(("q", "k", "v", "d_out"), dtype)
        types |= dict.fromkeys(("delta", "dq"), wide)
        cast = {name: jnp.asarray(getattr(self, name), types[name]) for name in types}
        carry = self.carry and tuple(jnp.asarray(x, wide) for x in self.carry)
        return self._replace(**cast, carry=carry)


@dataclass(frozen=True)
class StepCase:
    """Shapes of an attention step, and how it is asked for.

    group: query heads of a key/value head. bound_rows: 1 if rows share their bounds.
    has_carry: whether there were other keys before.
    """

    queries: int
    keys: int
    group: int = 2
    head_dim: int = 64
    kv_heads: int = 1
    batch: int = 2
    bound_rows: int = 1
    has_carry: bool = False
    scale: float = 0.2
    sizes: BlockSizes | None = None

    def draw(self, dtype: jnp.dtype = jnp.float32) -> Step:
        """Fresh random numbers, rounded to `dtype`, and the type of their sums."""
        rng = np.random.default_rng()
        heads = self.group * self.kv_heads

        def normal(*shape: int, dtype: jnp.dtype = dtype) -> np.ndarray:
            x = rng.standard_normal((self.batch, *shape))
            return np.asarray(jnp.asarray(x, dtype)).astype(np.float64)

        q = self.queries, heads, self.head_dim
        keys = self.keys, self.kv_heads, self.head_dim
        row = heads, self.queries
        lse = normal(*row, dtype=jnp.float32)
        lse[rng.random(lse.shape) < 0.3] = -np.inf
        seen = np.isfinite(lse).swapaxes(1, 2)[..., None]
        carry = np.where(seen, normal(*q, dtype=jnp.float32), 0), lse
        return Step(
            q=normal(*q),
            k=normal(*keys),
            v=normal(*keys),
            d_out=normal(*q),
            delta=normal(*row, dtype=jnp.float32),
            dq=normal(*q, dtype=jnp.float32),
            **self._bounds(rng),
            carry=carry if self.has_carry else None,
        )

    def _bounds(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """In the first row wide intervals that see nothing first, then any at all."""
        bounds = self.bound_rows, self.queries
        start = rng.integers(0, self.keys + 1, bounds)
        stop = rng.integers(0, self.keys + 1, bounds)
        start[0] = rng.integers(-self.keys, self.keys // 2 + 1, self.queries)
        stop[0] = rng.integers(-self.keys // 8, 2 * self.keys, self.queries)
        start, stop = (
            np.sort(x).clip(0, self.keys).astype(np.int32) for x in (start, stop)
        )
        return {"start": start, "stop": stop}


def run(
    backend: Backend, scale: float, sizes: BlockSizes | None, step: Step
) -> tuple[jax.Array, ...]:
    """(out, lse, dq, dk, dv) of a step, the gradients those for its own lse."""
    q, k, v, d_out, delta, dq, start, stop, carry = step
    how = {"scale": scale, "block_sizes": sizes}
    out, lse = backend.forward(q, k, v, start, stop, carry=carry, **how)
    given = q, k, v, d_out, lse, delta, start, stop
    return out, lse, *backend.backward(*given, dq=dq, **how)


def run_backward(backend: Backend, scale: float, step: Step) -> tuple[jax.Array, ...]:
    """(dq, dk, dv) as if the whole result had an lse of 0."""
    q, k, v, d_out, delta, dq, start, stop, _ = step
    given = q, k, v, d_out, jnp.zeros_like(delta), delta, start, stop
    return backend.backward(*given, scale=scale, dq=dq)


def compiled(
    backend: Backend, scale: float, sizes: BlockSizes | None = None
) -> Callable[[Step], tuple[jax.Array, ...]]:
    """`run` as a program of its own, compiled quickly."""
    program = functools.partial(run, backend, scale, sizes)
    return jax.jit(program, compiler_options=QUICK)


def compiled_backward(
    backend: Backend, scale: float
) -> Callable[[Step], tuple[jax.Array, ...]]:
    """`run_backward` as a program of its own, compiled quickly."""
    program = functools.partial(run_backward, backend, scale)
    return jax.jit(program, compiler_options=QUICK)


def answer(results: tuple[jax.Array, ...], step: Step) -> Answer:
    """Results to judge: of dq, the share that the step added."""
    out, lse, dq, dk, dv = (np.asarray(x, np.float64) for x in results)
    return Answer(out, lse, dq - step.dq, dk, dv)


@functools.cache
def _reference(scale: float) -> Callable[[Step], tuple[jax.Array, ...]]:
    return compiled(reference, scale)


def truth(case: StepCase, step: Step, dtype: jnp.dtype = jnp.float64) -> Answer:
    """What the reference answers, in float64 or a narrower type."""
    with jax.enable_x64(dtype == jnp.float64):
        return answer(_reference(case.scale)(step.astype(dtype)), step)
