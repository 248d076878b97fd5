"""Production rings for tests, on simulated devices or one after the other on one."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from kernels import layouts as layout
from kernels.backends import Backend
from kernels.ring import attend as ring
from kernels.ring.routes import ONE_WAY, Route
from kernels.ring.ulysses import over_heads
from tests.cases.attention import (
    BFLOAT16_RATIO,
    FLOAT32_TOLERANCE,
    LAYOUTS,
    QUICK,
    THOROUGH,
    Answer,
    Case,
    Problem,
    solve,
)

Results = tuple[jax.Array, ...]
Run = Callable[..., Results]
"""(q, k, v, do, d_lse, k_start, k_end, sinks) -> (out, lse, dq, dk, dv, d_sinks).

k_start, k_end: (m, B or 1, T), m intervals of keys.
In layout order, but sinks, which are None in a ring without.
"""

Make = Callable[[int, str, Backend, float | None], Run]
"""Of `sharded_ring` and `one_device_ring`."""

ARRAY, ROW, SINKS = 1, 2, None
OPERANDS = ARRAY, ARRAY, ARRAY, ARRAY, ROW, ROW, ROW, SINKS
"""Which axis of each is the tokens', if any."""
RESULTS = ARRAY, ROW, ARRAY, ARRAY, ARRAY, SINKS


def ring_mesh(ring_size: int, slices: int = 1) -> Mesh:
    """Returns a mesh of a ring, and of Ulysses where its shards are in slices."""
    devices = np.array(jax.devices()[: ring_size * slices])
    if slices == 1:
        return Mesh(devices, ("ring",))
    return Mesh(devices.reshape(ring_size, slices), ("ring", "ulysses"))


def device_program(
    ring_size: int,
    layout_name: str,
    backend: Backend,
    soft_cap: float | None = None,
    route: Route = ONE_WAY,
    axes: tuple[str, ...] = ("ring",),
) -> Run:
    """Builds the program of each device, forward and backward, on its shards.

    axes: the ring, and that of Ulysses if there is one.
    """

    def run(q, k, v, do, d_lse, k_start, k_end, sinks):
        scale = q.shape[-1] ** -0.5
        sizes = "ring", ring_size, LAYOUTS[layout_name], scale
        this_ring = ring.Ring(*sizes, backend, soft_cap, route)
        attend = functools.partial(ring.attend, this_ring)
        if len(axes) > 1:
            attend = functools.partial(over_heads, attend, axes[1])
        results, pull = jax.vjp(
            lambda *arrays: attend(*arrays, k_start, k_end), q, k, v, sinks
        )
        *gradients, d_sinks = pull((do, d_lse))
        if sinks is not None:
            d_sinks = jax.lax.psum(d_sinks, axes)
        return *results, *gradients, d_sinks

    return run


def sharded_ring(
    ring_size: int,
    layout_name: str,
    backend: Backend,
    soft_cap: float | None = None,
    route: Route = ONE_WAY,
    slices: int = 1,
) -> Run:
    """Builds a ring of as many devices, or of `slices` times as many under Ulysses."""
    mesh = ring_mesh(ring_size, slices)
    axes = mesh.axis_names
    specs = {ARRAY: P(None, axes), ROW: P(None, None, axes), SINKS: P()}
    options = soft_cap, route, axes
    return jax.shard_map(
        device_program(ring_size, layout_name, backend, *options),
        mesh=mesh,
        in_specs=tuple(specs[axis] for axis in OPERANDS),
        out_specs=tuple(specs[axis] for axis in RESULTS),
        check_vma=False,
    )


@functools.cache  # so that equal rings are compiled once
def ring_with(**options: Any) -> Make:
    """Returns `sharded_ring` with these options."""
    return functools.partial(sharded_ring, **options)


@dataclass(frozen=True)
class OneAfterTheOther:
    """A backend that computes the steps of a batch of devices one by one."""

    backend: Backend

    def forward(self, *operands, carry, **options):
        @sequential_vmap
        def step(operands, carry):
            return self.backend.forward(*operands, carry=carry, **options)

        return step(operands, carry)

    def backward(self, *operands, dq, dkv, **options):
        @sequential_vmap
        def step(operands, sums):
            return self.backend.backward(*operands, **sums, **options)

        return step(operands, {"dq": dq, "dkv": dkv})


def one_device_ring(
    ring_size: int, layout_name: str, backend: Backend, soft_cap: float | None = None
) -> Run:
    """Builds the same ring on one device, for kernels that run one at a time."""
    one_by_one = OneAfterTheOther(backend)
    program = device_program(ring_size, layout_name, one_by_one, soft_cap)

    def split(x, axis):
        if axis is SINKS:
            return x
        shape = *x.shape[:axis], ring_size, -1, *x.shape[axis + 1 :]
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def join(x, axis):
        if axis is SINKS:  # the same sum on each device
            return None if x is None else x[0]
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    def run(*operands):
        shards = map(split, operands, OPERANDS)
        axes = tuple(axis if axis is SINKS else 0 for axis in OPERANDS)
        results = jax.vmap(program, axes, axis_name="ring")(*shards)
        return tuple(map(join, results, RESULTS))

    return run


@functools.cache
def compiled_ring(
    make: Make,
    ring_size: int,
    layout_name: str,
    backend: Backend,
    soft_cap: float | None,
    is_short: bool,
) -> Run:
    """Compiles the program of `sharded_ring` or `one_device_ring`.

    What is rounded stays so: gradients are those of the out that is returned.
    """
    program = make(ring_size, layout_name, backend, soft_cap)
    options = QUICK if is_short else THOROUGH
    options = {**options, "xla_allow_excess_precision": False}
    return jax.jit(program, compiler_options=options)


def solve_on_ring(
    case: Case,
    problem: Problem,
    backend: Backend,
    dtype: jnp.dtype,
    make: Make = sharded_ring,
    slices: int = 1,
) -> Answer:
    """Pads with rubbish, permutes, runs the ring, and undoes both.

    slices: of each shard, on as many devices (see `kernels.ring.ulysses`).
    """
    order = LAYOUTS[case.layout], case.ring_size
    padded = layout.padded_length(*order, case.length, slices)

    def shard(x, axis, dtype, rubbish=1e4):
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, padded - case.length)
        x = np.pad(x, widths, constant_values=rubbish)
        return jnp.asarray(layout.permute(x, *order, axis), dtype)

    arrays = problem.q, problem.k, problem.v, problem.do
    operands = [shard(x, ARRAY, dtype) for x in arrays]
    # The lse of padding is the sink: its gradient counts.
    rubbish = 1e4 if problem.sinks is None else 0
    operands.append(shard(problem.d_lse, ROW, jnp.float32, rubbish))
    intervals = case.visible(padded).intervals()
    operands += (layout.permute(x, *order, axis=2) for x in intervals)
    sinks = problem.sinks
    operands.append(sinks if sinks is None else jnp.asarray(sinks, jnp.float32))
    options = case.soft_cap, case.length < 1000
    run = compiled_ring(make, case.ring_size, case.layout, backend, *options)
    *results, d_sinks = run(*operands)
    real = []
    for x, axis in zip(results, RESULTS[:-1], strict=True):
        x = layout.unpermute(np.asarray(x, np.float64), *order, axis)
        real.append(np.take(x, range(case.length), axis))
    return Answer(*real, *([] if sinks is None else [np.asarray(d_sinks, np.float64)]))


def assert_as_on_one_device(
    rng: np.random.Generator,
    case: Case,
    backend: Backend,
    dtype: jnp.dtype = jnp.float32,
    make: Make = sharded_ring,
    slices: int = 1,
) -> None:
    """Judges float32 by a tolerance, narrower types by one device's errors in them."""
    problem = Problem.of(rng, case, dtype)
    truth = solve(problem, jnp.float64)
    answer = solve_on_ring(case, problem, backend, dtype, make, slices)
    errors = answer.errors(truth)
    allowed = dict.fromkeys(errors, FLOAT32_TOLERANCE)
    if dtype != jnp.float32:
        one_device = solve(problem, dtype).errors(truth)
        allowed = {name: BFLOAT16_RATIO * one_device[name] + 1e-6 for name in errors}
        if case.has_sinks:
            del errors["d_sinks"]
            _assert_sums(problem, answer)
    for name, error in errors.items():
        assert error <= allowed[name], (case.name, name, errors, allowed)


def _assert_sums(problem: Problem, answer: Answer) -> None:
    """Holds d_sinks to the sums that they are, of the answer's own out and lse.

    Errors of out, which is judged by itself, are multiplied by do, which is random:
    what they add up to is of any size, by chance small in the reference. What is left
    is the rounding of n numbers added in float32: of at most about n · 2⁻²⁴ of the sum
    of their magnitudes, and in practice far less.
    """
    products = (problem.do * answer.out).swapaxes(1, 2)  # (B, H, T, D)
    terms = np.concatenate([products, -problem.d_lse[..., None]], axis=-1)
    terms *= -np.exp(problem.sinks[:, None] - answer.lse)[..., None]
    errors = abs(answer.d_sinks - terms.sum((0, 2, 3)))
    sizes = abs(terms).sum((0, 2, 3))
    assert (errors <= FLOAT32_TOLERANCE * sizes).all(), (errors, sizes)
