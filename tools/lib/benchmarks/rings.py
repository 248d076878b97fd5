"""Attention on a ring as it is benchmarked: the compiled ring, its steps, its tiles."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels import backends, make_ring_attention, masks
from kernels.compiler import compiler_options
from kernels.cost.choice import default_granule
from kernels.layouts import Contiguous, Layout, Striped, Zigzag, permute, unpermute
from tools.lib.benchmarks.problems import GRADED, Operands, Problem, bounds_of_steps
from tools.lib.benchmarks.rows import Sample, take_rounds, take_sample

LAYOUTS: dict[str, Layout] = {
    "contiguous": Contiguous(),
    "striped": Striped(),
    "zigzag": Zigzag(),
}


def layout_of(name: str, problem: Problem) -> Layout:
    """Returns a layout of LAYOUTS; in stripes as wide as a run's by default."""
    if name != "striped":
        return LAYOUTS[name]
    kind = jax.devices()[0].device_kind
    return Striped(default_granule(problem.ring_size, problem.length, kind))


class CompiledRing:
    """Our ring, forward and backward, with its operands on their devices."""

    versions = {"jax": jax.__version__}

    def __init__(
        self,
        problem: Problem,
        operands: Operands,
        layout: str,
        implementation: str,
        devices: Sequence[jax.Device],
    ):
        mesh = Mesh(np.array(devices), ("ring",))
        self._order, self._size = layout_of(layout, problem), problem.ring_size
        options = {"layout": self._order, "implementation": implementation}
        attend = make_ring_attention(mesh, **options)
        bounds = (permute(x, self._order, self._size) for x in problem.visible)
        visible = masks.Visible(*bounds)

        def both(q: Any, k: Any, v: Any, d_out: Any) -> tuple:
            out, pull = jax.vjp(lambda *x: attend(*x, visible), q, k, v)
            return out, *pull(d_out)

        sharding = NamedSharding(mesh, PartitionSpec(None, "ring"))
        given = (permute(np.asarray(x), self._order, self._size) for x in operands)
        placed = [jax.device_put(x, sharding) for x in given]
        begin = time.perf_counter()
        kind = compiler_options(devices[0].device_kind)
        program = jax.jit(both, compiler_options=kind).lower(*placed).compile()
        self._run = partial(program, *placed)
        self.compile_seconds = time.perf_counter() - begin

    def sample(self) -> Sample:
        """Runs it once."""
        return take_sample(self._run)

    def answer(self) -> dict[str, np.ndarray]:
        """Runs it, and brings the results into natural order, in float64."""
        found = (np.asarray(x, np.float64) for x in self._run())
        found = (unpermute(x, self._order, self._size) for x in found)
        return dict(zip(GRADED, found, strict=True))


Step = Callable[[jax.Array, jax.Array], Any]


def make_steps(problem: Problem, implementation: str) -> dict[str, Step]:
    """Returns one ring step forward, and one backward, as functions of the bounds."""
    step = backends.choose(implementation, jnp.dtype(problem.dtype))
    local = problem.length // problem.ring_size
    q, k, v, d_out = (x[:, :local] for x in problem.draw())
    wide = jnp.zeros(q.shape, jnp.float32)
    row = jnp.zeros((problem.batch, problem.heads, local), jnp.float32)
    # Weights are exp(score - lse): with this lse they stay small.
    lse = row + np.log(problem.length)
    scale = problem.head_dim**-0.5

    @jax.jit
    def forward(q, k, v, start, stop, out, lse):
        return step.forward(q, k, v, start, stop, scale=scale, carry=(out, lse))

    @jax.jit
    def backward(q, k, v, d_out, lse, delta, start, stop, dq):
        operands = q, k, v, d_out, lse, delta, start, stop
        return step.backward(*operands, scale=scale, dq=dq)

    return {
        "forward": lambda *bounds: forward(q, k, v, *bounds, wide, lse),
        "backward": lambda *bounds: backward(q, k, v, d_out, lse, row, *bounds, wide),
    }


def time_steps(
    problem: Problem, layouts: Sequence[str], step: Step, repeats: int, calls: int
) -> dict[str, np.ndarray]:
    """Returns median seconds, (devices, steps), of each layout, timed in rounds."""
    size = problem.ring_size
    seconds = {name: np.zeros((size, size)) for name in layouts}
    each = (
        bounds_of_steps(layout_of(n, problem), size, problem.visible) for n in layouts
    )
    for steps in zip(*each, strict=True):
        runs = [partial(step, *map(jnp.int32, bounds)) for _, bounds in steps]
        takes = [partial(take_sample, run, calls) for run in runs]
        for name, (place, _), samples in zip(
            layouts, steps, take_rounds(takes, repeats), strict=True
        ):
            seconds[name][place] = statistics.median(x.wall for x in samples)
    return seconds


def start_devices(count: int) -> list[jax.Device]:
    """Returns `count` accelerators, or simulated CPU devices without any.

    Raises:
      ValueError: the machine has fewer.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has its devices already, and they cannot change
    devices = jax.devices()
    if len(devices) < count:
        raise ValueError(
            f"--devices {count}, but there are {len(devices)} of "
            f"{devices[0].device_kind}: ask for fewer, or set JAX_PLATFORMS=cpu"
        )
    return devices[:count]
