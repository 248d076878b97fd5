"""Attention steps of a ring: prepared once, run for every chunk of keys.

A backend has `forward` and `backward`, as `reference` documents them, and these are
called in each ring step (`PlainForward`, `PlainBackward`). One that keeps operands in a
form of its own also has `forward_steps` and `backward_steps`: then what depends on
queries and bounds alone is laid out once a ring, before its loop.

Sums are float32 between steps. Where one kernel computes all it may write results: so
a pass sets `out_type` of forward steps that have it, and `dk_scale` of backward ones.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from ..masks import Visible
from ..merge import Partial
from ..precision import Scores, accumulator_type

Prepared = TypeVar("Prepared")
"""What a kernel reads of the bounds of a ring step; arrays, which `jax.vmap` stacks."""

Carry = TypeVar("Carry")
"""A partial result, or dq so far, in the form in which kernels read and write it.

It depends on the queries, and in the forward on the number of keys (`CommonForward`).
"""

KeyGradients = tuple[jax.Array, jax.Array]
"""dk and dv (B, S, K, D) of the keys of a ring step, in float32."""


class Rows(NamedTuple):
    """What the backward reads of a device's queries.

    q, do: (B, L, H, D). lse, delta: (B, H, L); delta is the sum of out · do over D,
    less the gradient of lse.
    """

    q: jax.Array
    do: jax.Array
    lse: jax.Array
    delta: jax.Array


class ForwardSteps(Protocol[Prepared, Carry]):
    """Attention of queries (B, L, H, D) to the keys of one ring step after another.

    `attend` is called for each chunk of keys with what `prepare` made of its bounds;
    the first time without a carry, then with what it returned.
    """

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Prepared:
        """Returns what the kernel reads of bounds (B or 1, L), local slots."""
        ...

    def begin(self, partial: Partial, /) -> Carry:
        """Returns a partial result, as `reference` has it, in the kernel's form."""
        ...

    def attend(
        self, k: jax.Array, v: jax.Array, prepared: Prepared, carry: Carry | None
    ) -> Carry:
        """Attends to keys and values (B, S, K, D), and goes on from a carry."""
        ...

    def finish(self, carry: Carry, /) -> Partial:
        """Returns out (B, L, H, D) and lse (B, H, L), in float32."""
        ...


class BackwardSteps(Protocol[Prepared, Carry]):
    """Gradients of some `Rows`, and of the keys of one ring step after another.

    dq and dk are without the factor `scale`; bounds may be empty.
    """

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Prepared:
        """Returns what the kernel reads of bounds (B or 1, L), local slots."""
        ...

    def begin(self, dq: jax.Array, /) -> Carry:
        """Returns dq (B, L, H, D) so far in the kernel's form."""
        ...

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: Prepared,
        dq: Carry,
        dkv: KeyGradients | None,
    ) -> tuple[Carry, jax.Array, jax.Array]:
        """Adds to dq, and to dk and dv (B, S, K, D) of these keys; None are zeros."""
        ...

    def finish(self, dq: Carry, /) -> jax.Array:
        """Returns dq (B, L, H, D), in float32."""
        ...


class PlainForm:
    """Steps whose bounds, partial results and dq have the form of `reference`."""

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Any:
        return k_start, k_end

    def begin(self, sums: Any, /) -> Any:
        return sums

    def finish(self, sums: Any, /) -> Any:
        return sums


@dataclass(frozen=True)
class PlainForward(PlainForm):
    """Forward steps that are calls of a backend's `forward`."""

    backend: Any
    q: jax.Array
    scores: Scores

    def attend(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: tuple[jax.Array, jax.Array],
        carry: Partial | None,
    ) -> Partial:
        k_start, k_end = prepared
        return self.backend.forward(
            self.q,
            k,
            v,
            k_start,
            k_end,
            carry=carry,
            scale=self.scores.scale,
            soft_cap=self.scores.soft_cap,
        )


@dataclass(frozen=True)
class CommonForward(PlainForm):
    """Converts the carry to the form of `reference` after each step.

    Chunks of different length are tiled differently: the carry of the kernel for one is
    not that of the kernel for another.
    """

    steps: ForwardSteps

    def prepare(self, k_start: jax.Array, k_end: jax.Array) -> Any:
        return self.steps.prepare(k_start, k_end)

    def attend(
        self, k: jax.Array, v: jax.Array, prepared: Any, carry: Partial | None
    ) -> Partial:
        own = None if carry is None else self.steps.begin(carry)
        return self.steps.finish(self.steps.attend(k, v, prepared, own))


@dataclass(frozen=True)
class PlainBackward(PlainForm):
    """Backward steps that are calls of a backend's `backward`."""

    backend: Any
    rows: Rows
    scores: Scores

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: tuple[jax.Array, jax.Array],
        dq: jax.Array,
        dkv: KeyGradients | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        k_start, k_end = prepared
        return self.backend.backward(
            self.rows.q,
            k,
            v,
            self.rows.do,
            self.rows.lse,
            self.rows.delta,
            k_start,
            k_end,
            dq=dq,
            dkv=dkv,
            scale=self.scores.scale,
            soft_cap=self.scores.soft_cap,
        )


class Kernels(ABC):
    """A backend whose `forward` and `backward` run one of its steps by itself."""

    @abstractmethod
    def forward_steps(
        self, q: jax.Array, k: jax.Array, visible: Visible, scores: Scores
    ) -> ForwardSteps:
        """Lays out queries, as the function of this name."""

    @abstractmethod
    def backward_steps(
        self, rows: Rows, k: jax.Array, visible: Visible, scores: Scores
    ) -> BackwardSteps:
        """Lays out rows, as the function of this name."""

    def forward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        k_start: jax.Array,
        k_end: jax.Array,
        *,
        scale: float,
        soft_cap: float | None = None,
        carry: Partial | None = None,
    ) -> Partial:
        """Attends from every query to the keys [k_start, k_end): see `reference`."""
        scores = Scores(scale, soft_cap)
        steps = self.forward_steps(q, k, Visible(k_start, k_end), scores)
        start = None if carry is None else steps.begin(carry)
        prepared = steps.prepare(k_start, k_end)
        return steps.finish(steps.attend(k, v, prepared, start))

    def backward(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        do: jax.Array,
        lse: jax.Array,
        delta: jax.Array,
        k_start: jax.Array,
        k_end: jax.Array,
        *,
        dq: jax.Array,
        dkv: KeyGradients | None = None,
        scale: float,
        soft_cap: float | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of the attention to these keys: see `reference`."""
        rows = Rows(q, do, lse, delta)
        scores = Scores(scale, soft_cap)
        steps = self.backward_steps(rows, k, Visible(k_start, k_end), scores)
        prepared = steps.prepare(k_start, k_end)
        dq, dk, dv = steps.add(k, v, prepared, steps.begin(dq), dkv)
        return steps.finish(dq), dk, dv


def forward_steps(
    backend: Any, q: jax.Array, k: jax.Array, visible: Visible, scores: Scores
) -> ForwardSteps:
    """Lays out queries (B, L, H, D) for the forward steps of a ring.

    k (B, S, K, D), visible (m, B or 1, L): only their shapes are read; those of any
      ring step will do.
    """
    make = getattr(backend, "forward_steps", None)
    if make:
        return make(q, k, _of_one(visible), scores)
    return PlainForward(backend, q, scores)


def backward_steps(
    backend: Any, rows: Rows, k: jax.Array, visible: Visible, scores: Scores
) -> BackwardSteps:
    """Lays out rows for the backward steps of a ring: see `forward_steps`."""
    make = getattr(backend, "backward_steps", None)
    if make:
        return make(rows, k, _of_one(visible), scores)
    return PlainBackward(backend, rows, scores)


def rounded(gradient: jax.Array, factor: float, dtype: jnp.dtype) -> jax.Array:
    """Returns a gradient's sum, times a factor, in a type; in 16 bits it has both."""
    is_sum = gradient.dtype == accumulator_type(dtype)
    return (factor * gradient).astype(dtype) if is_sum else gradient


def _of_one(visible: Visible) -> Visible:
    """Returns the bounds of an interval, (B or 1, T)."""
    # A step's kernel runs once for each interval, and is laid out for one.
    return Visible(*(bound[0] for bound in visible))


def nothing(q: jax.Array) -> Partial:
    """Returns the partial result of queries (B, T, H, D) without keys: 0 and -inf."""
    out = jnp.zeros_like(q, accumulator_type(q.dtype))
    return out, jnp.full_like(out[..., 0].swapaxes(1, 2), -jnp.inf)
