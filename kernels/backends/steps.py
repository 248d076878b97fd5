"""Attention steps of a ring's queries: prepared once, run for every chunk of keys.

A backend may have functions `forward_steps` and `backward_steps`, whose results have
the methods of `PlainForward` and `PlainBackward`: then what depends on queries and
bounds alone is computed once a ring, before its loop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..masks import Visible
from ..merge import Partial
from ..precision import Scores, accumulator_type

Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
"""q, do (B, L, H, D), lse and delta (B, H, L) of a device's queries."""


class PlainForm:
    """Steps whose bounds, partial results and dq have the form of `reference`."""

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Any:
        """Returns what the kernel reads of the bounds (B or 1, T) of a step."""
        return k_start, k_end

    def begin(self, sums: Any) -> Any:
        """Returns a partial result, or dq so far, in the backend's own form."""
        return sums

    def finish(self, sums: Any) -> Any:
        """Returns it as `reference` does."""
        return sums


@dataclass(frozen=True)
class PlainForward(PlainForm):
    """Forward steps that are calls of a backend's `forward`."""

    backend: Any
    q: jax.Array
    scores: Scores

    def attend(self, k: jax.Array, v: jax.Array, seen: Any, carry: Any) -> Any:
        """Attends to keys, and goes on from a carry in that form, if any.

        seen: as `prepare` returns it.
        """
        operands = self.q, k, v, *seen
        return self.backend.forward(*operands, carry=carry, **self.scores._asdict())


@dataclass(frozen=True)
class CommonForward(PlainForm):
    """Forward steps that pass on partial results as `reference.forward` returns them.

    Kernels for keys of several lengths may cut the queries, and their results, each in
    a way of its own.
    """

    steps: Any

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Any:
        return self.steps.prepare(k_start, k_end)

    def attend(self, k: jax.Array, v: jax.Array, seen: Any, carry: Any) -> Partial:
        carry = carry and self.steps.begin(carry)
        return self.steps.finish(self.steps.attend(k, v, seen, carry))


@dataclass(frozen=True)
class PlainBackward(PlainForm):
    """Backward steps that are calls of a backend's `backward`."""

    backend: Any
    rows: Rows
    scores: Scores

    def add(
        self, k: jax.Array, v: jax.Array, seen: Any, dq: jax.Array, dkv: Any
    ) -> Any:
        """Returns dq in the backend's own form, and dk and dv as `reference` does."""
        q, *others = self.rows
        operands, scores = (q, k, v, *others, *seen), self.scores._asdict()
        return self.backend.backward(*operands, dq=dq, dkv=dkv, **scores)


class Kernels:
    """A backend whose `forward` and `backward` run one of its steps by itself.

    A subclass has `forward_steps` and `backward_steps`: of the functions of that name,
    all arguments but the backend.
    """

    forward_steps: Callable[..., Any]
    backward_steps: Callable[..., Any]

    def forward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *bounds: jax.Array,
        carry: Partial | None = None,
        **scores: Any,
    ) -> Partial:
        """Attends from every query to the keys [k_start, k_end): see `reference`."""
        steps = self.forward_steps(q, k, Visible(*bounds), Scores(**scores))
        start = None if carry is None else steps.begin(carry)
        return steps.finish(steps.attend(k, v, steps.prepare(*bounds), start))

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *rows: jax.Array,
        dq: jax.Array,
        dkv: tuple[jax.Array, jax.Array] | None = None,
        **scores: Any,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of the attention to these keys: see `reference`."""
        (do, lse, delta), visible = rows[:3], Visible(*rows[3:])
        rows = q, do, lse, delta
        steps = self.backward_steps(rows, k, visible, Scores(**scores))
        seen = steps.prepare(*visible)
        dq, dk, dv = steps.add(k, v, seen, steps.begin(dq), dkv)
        return steps.finish(dq), dk, dv


def forward_steps(
    backend: Any, q: jax.Array, k: jax.Array, visible: Visible, scores: Scores
) -> Any:
    """Prepares the forward steps of queries (B, T, H, D), as a `PlainForward` does.

    k: of any step. visible: of any, (m, B or 1, T). Of both the shapes count.
    """
    make = getattr(backend, "forward_steps", None)
    if make:
        return make(q, k, _of_one(visible), scores)
    return PlainForward(backend, q, scores)


def backward_steps(
    backend: Any, rows: Rows, k: jax.Array, visible: Visible, scores: Scores
) -> Any:
    """Prepares the backward steps of rows q, do, lse, delta: see `forward_steps`."""
    make = getattr(backend, "backward_steps", None)
    if make:
        return make(rows, k, _of_one(visible), scores)
    return PlainBackward(backend, rows, scores)


def _of_one(visible: Visible) -> Visible:
    """Returns the bounds of an interval, (B or 1, T)."""
    return Visible(*(bound[0] for bound in visible))


def nothing(q: jax.Array) -> Partial:
    """Returns the partial result of queries (B, T, H, D) without keys: 0 and -inf."""
    out = jnp.zeros_like(q, accumulator_type(q.dtype))
    return out, jnp.full_like(out[..., 0].swapaxes(1, 2), -jnp.inf)
