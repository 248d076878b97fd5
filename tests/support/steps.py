"""Random attention steps for backends, as rings give them, and their judgement."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.random import Generator

from kernels.backends import Backend, reference
from kernels.backends.steps import Rows, backward_steps, forward_steps, rounded
from kernels.backends.tile_layout import BlockSizes
from kernels.masks import Visible
from kernels.merge import Partial
from kernels.precision import Scores, accumulator_type
from tests.cases.attention import BFLOAT16_RATIO, FLOAT32_TOLERANCE, QUICK, Answer

Arrays = tuple[jax.Array, ...]
Sizes = BlockSizes | None


class Step(NamedTuple):
    """Operands of one attention step, forward and backward: see `reference`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    delta: np.ndarray
    dq: np.ndarray
    k_start: np.ndarray
    k_end: np.ndarray
    carry: Partial | None
    dkv: tuple[np.ndarray, np.ndarray] | None

    def astype(self, dtype: jnp.dtype) -> "Step":
        """Casts operands of matmuls to `dtype`, and sums to its accumulator's type."""
        wide = accumulator_type(dtype)
        types = dict.fromkeys(("q", "k", "v", "do"), dtype)
        types |= dict.fromkeys(("delta", "dq"), wide)
        cast = {name: jnp.asarray(getattr(self, name), types[name]) for name in types}
        carry, dkv = (
            pair and tuple(jnp.asarray(x, wide) for x in pair)
            for pair in (self.carry, self.dkv)
        )
        return self._replace(**cast, carry=carry, dkv=dkv)


@dataclass(frozen=True)
class StepCase:
    """Shapes and options of an attention step.

    group: query heads of a key/value head. bound_rows: 1, or batch rows with bounds of
      their own. has_carry: whether other keys came before, and other queries to these
      keys. sizes: of `blockwise`; None for a default.
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
    soft_cap: float | None = None

    @classmethod
    def of_any_length(
        cls, rng: Generator, longest: int, group: int, head_dim: int, bound_rows: int
    ) -> "StepCase":
        """Draws 1 to `longest` queries and 64 to `longest` keys.

        With a handful of keys the reference's weights are exact even in bfloat16.
        """
        queries, keys = (
            int(np.exp(rng.uniform(*np.log((low, longest))))) for low in (1, 64)
        )
        has_carry = bool(rng.integers(2))
        scale = rng.choice((-1, 1)) * head_dim**-0.5
        more = {"bound_rows": bound_rows, "has_carry": has_carry, "scale": scale}
        return cls(queries, keys, group, head_dim, **more)

    def draw(self, rng: Generator, dtype: jnp.dtype = jnp.float32) -> Step:
        """Draws operands, rounded to `dtype` and float32, held in float64."""
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
            do=normal(*q),
            delta=normal(*row, dtype=jnp.float32),
            dq=normal(*q, dtype=jnp.float32),
            **self._bounds(rng),
            carry=carry if self.has_carry else None,
            dkv=(normal(*keys), normal(*keys)) if self.has_carry else None,
        )

    def abstract(self, dtype: jnp.dtype) -> Step:
        """Returns the types and shapes of a step, for what is only compiled."""

        def array(*shape: int, dtype: jnp.dtype = dtype) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch, *shape), dtype)

        heads, wide = self.group * self.kv_heads, accumulator_type(dtype)
        q = array(self.queries, heads, self.head_dim)
        k = array(self.keys, self.kv_heads, self.head_dim)
        out = array(self.queries, heads, self.head_dim, dtype=wide)
        row = array(heads, self.queries, dtype=wide)
        bound = jax.ShapeDtypeStruct((self.bound_rows, self.queries), jnp.int32)
        dk = array(self.keys, self.kv_heads, self.head_dim, dtype=wide)
        sums = ((out, row), (dk, dk)) if self.has_carry else (None, None)
        return Step(q, k, k, q, row, out, bound, bound, *sums)

    def _bounds(self, rng: Generator) -> dict[str, np.ndarray]:
        """Draws wide intervals, some empty, in the first row and any in the others.

        The last query of the first row sees a quarter of the keys or more.
        """
        bounds = self.bound_rows, self.queries
        k_start = rng.integers(0, self.keys + 1, bounds)
        k_end = rng.integers(0, self.keys + 1, bounds)
        k_start[0] = rng.integers(-self.keys, self.keys // 2 + 1, self.queries)
        k_end[0] = rng.integers(-self.keys // 8, 2 * self.keys, self.queries)
        k_start, k_end = (
            np.sort(x).clip(0, self.keys).astype(np.int32) for x in (k_start, k_end)
        )
        k_end[0, -1] = max(k_end[0, -1], -(-3 * self.keys // 4))
        return {"k_start": k_start, "k_end": k_end}


def _tiles(sizes: Sizes) -> dict[str, BlockSizes]:
    """Returns the option of `blockwise`, which no other backend has."""
    return {} if sizes is None else {"block_sizes": sizes}


def run_forward(
    backend: Backend, scale: float, sizes: Sizes, step: Step, **cap: float
) -> Partial:
    """Returns (out, lse). cap: soft_cap, if there is one."""
    given = step.q, step.k, step.v, step.k_start, step.k_end
    options = {"scale": scale, **_tiles(sizes), **cap}
    return backend.forward(*given, carry=step.carry, **options)


def run_backward(
    backend: Backend,
    scale: float,
    sizes: Sizes,
    step: Step,
    lse: Any = None,
    **cap: float,
) -> Arrays:
    """Returns (dq, dk, dv), by default as if the whole result had an lse of 0."""
    q, k, v, do, delta, dq, k_start, k_end, _, dkv = step
    lse = jnp.zeros_like(delta) if lse is None else lse
    given = q, k, v, do, lse, delta, k_start, k_end
    options = {"scale": scale, **_tiles(sizes), **cap}
    return backend.backward(*given, dq=dq, dkv=dkv, **options)


def run(
    backend: Backend, scale: float, sizes: Sizes, step: Step, **cap: float
) -> Arrays:
    """Returns (out, lse, dq, dk, dv) of a step; gradients by its own lse."""
    out, lse = run_forward(backend, scale, sizes, step, **cap)
    return out, lse, *run_backward(backend, scale, sizes, step, lse, **cap)


def run_rounding(
    backend: Backend, scale: float, sizes: Sizes, step: Step, **cap: float
) -> tuple[Arrays, Arrays]:
    """Returns (out, lse, dq, dk, dv) of a step without dq, dk and dv so far, twice.

    First the sums, rounded here to the type of the operands; then as kernels round.
    """
    del sizes
    visible = Visible(step.k_start[None], step.k_end[None])
    bounds = step.k_start, step.k_end
    scores = Scores(scale, **cap)
    rows = Rows(step.q, step.do, jnp.zeros_like(step.delta), step.delta)
    forward = forward_steps(backend, step.q, step.k, visible, scores)
    backward = backward_steps(backend, rows, step.k, visible, scores)
    dtype = step.q.dtype

    def results(forward: Any, backward: Any) -> Arrays:
        carry = forward.begin(step.carry)
        carry = forward.attend(step.k, step.v, forward.prepare(*bounds), carry)
        out, lse = forward.finish(carry)
        dq = backward.begin(jnp.zeros_like(step.dq))
        seen = backward.prepare(*bounds)
        dq, dk, dv = backward.add(step.k, step.v, seen, dq, None)
        dq, dk = (rounded(x, scale, dtype) for x in (backward.finish(dq), dk))
        return out.astype(dtype), lse, dq, dk, rounded(dv, 1.0, dtype)

    rounding = replace(forward, out_type=dtype), replace(backward, dk_scale=scale)
    return results(forward, backward), results(*rounding)


PASSES = {"forward": run_forward, "backward": run_backward}


def compiled(
    backend: Backend,
    scale: float,
    sizes: Sizes = None,
    soft_cap: float | None = None,
    run=run,
) -> Callable[[Step], Arrays]:
    """Returns `run` or one of the passes as a new program, compiled quickly."""
    cap = {} if soft_cap is None else {"soft_cap": soft_cap}
    program = functools.partial(run, backend, scale, sizes, **cap)
    return jax.jit(program, compiler_options=QUICK)


shared = functools.cache(compiled)
"""`compiled`, one program for all tests; not for those that patch a kernel."""


def answer(results: Arrays, step: Step) -> Answer:
    """Returns results in float64, of gradients what the step added."""
    out, lse, dq, dk, dv = (np.asarray(x, np.float64) for x in results)
    sums = step.dkv or (0, 0)
    return Answer(out, lse, dq - step.dq, dk - sums[0], dv - sums[1])


def truth(case: StepCase, step: Step, dtype: jnp.dtype = jnp.float64) -> Answer:
    """Returns the reference's results, in float64 or a narrower type."""
    with jax.enable_x64(dtype == jnp.float64):
        run = shared(reference, case.scale, None, case.soft_cap)
        return answer(run(step.astype(dtype)), step)


def assert_true(
    rng: Generator, backend: Backend, case: StepCase, dtype: jnp.dtype
) -> None:
    """Judges float32 by a tolerance, narrower types by the reference in the same."""
    step = case.draw(rng, dtype)
    run = shared(backend, case.scale, case.sizes, case.soft_cap)
    results = run(step.astype(dtype))
    assert {x.dtype for x in results} == {np.dtype(np.float32)}
    exact = truth(case, step)
    errors = answer(results, step).errors(exact)
    allowed = dict.fromkeys(errors, FLOAT32_TOLERANCE)
    if dtype != jnp.float32:
        same_type = truth(case, step, dtype).errors(exact)
        allowed = {x: BFLOAT16_RATIO * same_type[x] + 1e-6 for x in errors}
    for name, error in errors.items():
        assert error <= allowed[name], (name, errors, allowed)
