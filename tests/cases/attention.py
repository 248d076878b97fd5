"""Attention cases that every implementation must pass, and their tolerances.

They are random problems with their answers. In `COVERING` every pair of
values (ring size and mask, mask and length, …) occurs at least once.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from kernels import layouts as layout
from kernels import masks
from kernels.backends import reference
from kernels.layouts import Layout
from kernels.masks import Mask, Visible
from kernels.precision import accumulator_type
from tests.cases.unions import UNIONS

FLOAT32_TOLERANCE = 1e-5
"""Largest norm of an error, relative to the norm of the expected array."""

BFLOAT16_RATIO = 2.0
"""Largest error relative to that of the reference run in bfloat16 on one device."""

QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options of half the compile time, for small programs."""

THOROUGH = {
    "xla_backend_optimization_level": 1,
    "xla_llvm_disable_expensive_passes": False,
}
"""Compiler options for programs that run for seconds."""

LAYOUTS: dict[str, Layout] = {
    "contiguous": layout.Contiguous(),
    "striped": layout.Striped(),
    "striped4": layout.Striped(4),
    "zigzag": layout.Zigzag(),
    "mirror": layout.Mirror(),
}

MASKS: dict[str, Callable[[int, int], Mask]] = {
    "none": lambda length, padded: masks.full(),
    "causal": lambda length, padded: masks.causal(),
    "documents": lambda length, padded: masks.documents(_document_ids(length, padded)),
    "window": lambda length, padded: masks.window(max(1, length // 3)),
}


EXTRAS = "", "sinks", "cap", "sinks-cap"

SOFT_CAP = 1.5
"""Of cases with a cap: scores have a standard deviation of 1."""


def _document_ids(length: int, padded_length: int) -> np.ndarray:
    """Draws about five documents of different lengths; the last has the padding."""
    rng = np.random.default_rng(length)
    begins = rng.random(length) < 5 / length
    ids = np.cumsum(begins * rng.integers(1, 4, length)).astype(np.int32)
    return np.pad(ids, (0, padded_length - length), mode="edge")


@dataclass(frozen=True)
class Case:
    """Sizes of one attention problem, and the ring that it is solved on."""

    ring_size: int
    layout: str
    mask: str
    group: int  # query heads of a key/value head
    length: int
    head_dim: int
    extras: str = ""  # a name of EXTRAS
    heads: int = 8
    batch: int = 1

    @property
    def name(self) -> str:
        more = f"-{self.extras}" if self.extras else ""
        return (
            f"ring{self.ring_size}-{self.layout}-{self.mask}-g{self.group}"
            f"-t{self.length}-d{self.head_dim}{more}"
        )

    @property
    def has_sinks(self) -> bool:
        return "sinks" in self.extras

    @property
    def soft_cap(self) -> float | None:
        return SOFT_CAP if "cap" in self.extras else None

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    def visible(self, padded_length: int) -> Visible:
        """Returns bounds of the sequence, padded at the end: (1, padded_length).

        Of a mask of UNIONS (m, 1, padded_length).
        """
        mask = (MASKS | UNIONS)[self.mask](self.length, padded_length)
        mask &= masks.padding(self.length)
        return mask(np.arange(padded_length, dtype=np.int32), self.length)


GRID = {
    "ring_size": (1, 2, 3, 4, 8),
    "layout": tuple(LAYOUTS),
    "mask": tuple(MASKS),
    "group": (1, 4, 8),
    "length": (1, 31, 257, 4093),
    "head_dim": (64, 100, 128),
    "extras": EXTRAS,
}


def covering(grid: dict[str, tuple]) -> list[tuple]:
    """Chooses rows of a grid in which any two values of two settings meet (greedy)."""
    rows = list(itertools.product(*grid.values()))
    np.random.default_rng(0).shuffle(rows)
    pairs = [frozenset(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing, chosen = frozenset().union(*pairs), []
    while missing:
        best = max(range(len(rows)), key=lambda i: len(pairs[i] & missing))
        chosen.append(rows[best])
        missing -= pairs[best]
    return chosen


def _with_few_heads(row: tuple) -> Case:
    """Builds a case with few heads if it is long: they take seconds a head."""
    case = Case(*row)
    heads = max(2, case.group) if case.length > 100 else case.heads
    return dataclasses.replace(case, heads=heads)


COVERING = tuple(map(_with_few_heads, covering(GRID)))


@dataclass(frozen=True)
class Problem:
    """Random operands of a case and gradients of its results, in natural order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    d_lse: np.ndarray
    visible: Visible
    sinks: np.ndarray | None = None  # (H,)
    soft_cap: float | None = None

    @classmethod
    def of(
        cls, rng: np.random.Generator, case: Case, dtype: jnp.dtype = jnp.float32
    ) -> "Problem":
        """Draws operands, rounded to `dtype` and stored in float64."""

        def normal(*shape: int) -> np.ndarray:
            x = rng.standard_normal((case.batch, case.length, *shape))
            return np.asarray(jnp.asarray(x, dtype)).astype(np.float64)

        d_lse = rng.standard_normal((case.batch, case.heads, case.length))
        return cls(
            normal(case.heads, case.head_dim),
            normal(case.kv_heads, case.head_dim),
            normal(case.kv_heads, case.head_dim),
            normal(case.heads, case.head_dim),
            d_lse,
            case.visible(case.length),
            rng.standard_normal(case.heads) if case.has_sinks else None,
            case.soft_cap,
        )


_no_sinks = functools.partial(np.zeros, 0)


@dataclass(frozen=True)
class Answer:
    """Results and gradients in natural order, float64 NumPy."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    d_sinks: np.ndarray = field(default_factory=_no_sinks)  # (H,), or (0,)

    def errors(self, truth: "Answer") -> dict[str, float]:
        """Returns the norm of each error relative to the norm of the truth."""
        has_keys = np.isfinite(truth.lse)
        assert (np.isneginf(self.lse) == ~has_keys).all(), "empty rows differ"
        both = {
            name: (getattr(self, name), getattr(truth, name))
            for name in ("out", "dq", "dk", "dv", "d_sinks")
            if getattr(truth, name).size
        }
        both["lse"] = self.lse[has_keys], truth.lse[has_keys]
        return {name: _relative_error(*pair) for name, pair in both.items()}


def _relative_error(x: np.ndarray, truth: np.ndarray) -> float:
    # Inputs are of order one: where the truth is (nearly) zero, as dq is if only one
    # key is visible, the error is absolute.
    return float(np.linalg.norm(x - truth) / max(np.linalg.norm(truth), 1e-2))


def solve(problem: Problem, dtype: jnp.dtype) -> Answer:
    """Runs the reference on one device, head after head, in float64 or narrower."""
    with jax.enable_x64(dtype == jnp.float64):
        kv_heads = problem.k.shape[2]
        group = problem.q.shape[2] // kv_heads
        heads = [
            _solve_head(problem, h, h // group, dtype) for h in range(kv_heads * group)
        ]
    *parts, d_sinks = zip(*heads, strict=True)
    out, lse, dq, dk, dv = (np.concatenate(part, -2) for part in parts)
    shared = (*problem.k.shape[:2], kv_heads, group, problem.k.shape[3])
    # Rounded once, after the sum over the group, as results in this type are.
    with jax.enable_x64(dtype == jnp.float64):
        dk, dv = (
            np.asarray(jnp.asarray(x.reshape(shared).sum(3), dtype), np.float64)
            for x in (dk, dv)
        )
    return Answer(out, lse, dq, dk, dv, np.concatenate(d_sinks))


def _solve_head(problem: Problem, head: int, kv_head: int, dtype: jnp.dtype) -> list:
    q, do = (jnp.asarray(x[:, :, [head]], dtype) for x in (problem.q, problem.do))
    k, v = (jnp.asarray(x[:, :, [kv_head]], dtype) for x in (problem.k, problem.v))
    wide = accumulator_type(dtype)
    d_lse, sinks = jnp.asarray(problem.d_lse[:, [head]], wide), jnp.zeros(0, wide)
    if problem.sinks is not None:
        sinks = jnp.asarray(problem.sinks[[head]], wide)
    operands = q, k, v, do, d_lse, sinks, *problem.visible.intervals()
    results = _reference_head(*operands, soft_cap=problem.soft_cap)
    return [np.asarray(x, np.float64) for x in results]


@functools.partial(
    jax.jit,
    static_argnames="soft_cap",
    # What is rounded stays so: delta is that of the rounded out.
    compiler_options=THOROUGH | {"xla_allow_excess_precision": False},
)
def _reference_head(q, k, v, do, d_lse, sinks, k_start, k_end, *, soft_cap):
    scores = {"scale": q.shape[-1] ** -0.5, "soft_cap": soft_cap}
    carry, intervals = None, list(zip(k_start, k_end, strict=True))
    for bounds in intervals:
        carry = reference.forward(q, k, v, *bounds, **scores, carry=carry)
    out, lse = carry
    if sinks.size:
        keys = lse, jnp.broadcast_to(sinks[:, None], lse.shape)
        lse = jnp.logaddexp(*keys)  # of the keys and the sink
        out *= jnp.swapaxes(jnp.exp(keys[0] - lse), 1, 2)[..., None]
    out = out.astype(q.dtype)
    delta = jnp.einsum("bthd,bthd->bht", out, do, preferred_element_type=lse.dtype)
    delta -= d_lse
    d_sinks = -(jnp.exp(sinks[:, None] - lse) * delta).sum((0, 2))[: sinks.size]
    dq, dkv, rows = jnp.zeros(q.shape, lse.dtype), None, (do, lse, delta)
    for bounds in intervals:
        sums = {"dq": dq, "dkv": dkv}
        dq, dk, dv = reference.backward(q, k, v, *rows, *bounds, **scores, **sums)
        dkv = dk, dv
    dq, dk = scores["scale"] * dq, scores["scale"] * dk
    return out, lse, dq.astype(q.dtype), dk, dv, d_sinks
