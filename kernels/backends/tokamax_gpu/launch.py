"""Runs the Mosaic GPU kernels of tokamax as steps of a ring: see `backends.steps`.

They take bounds per query and return m and l, of which lse is made. They go on from no
carry, so partial results are merged in XLA, and they round dq, dk and dv to the type of
q in each ring step. tokamax is imported when a step is first run.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ...devices.device import device_kind, is_blackwell, is_hopper
from ...masks import Visible
from ...merge import Partial, added, merge
from ...precision import Scores
from ..steps import Kernels, PlainForm, Rows
from . import MAX_HEAD, TESTED, TYPES, installed_version

TILE = 128
"""Keys are padded to a multiple: the forward leaves out what is beyond the last one."""

SMALLEST = float(jnp.finfo(jnp.float32).smallest_normal)


class Modules(NamedTuple):
    """Modules of tokamax for a generation of GPUs, each with kernels and a `Config`."""

    generation: str
    forward: Any
    backward: Any


class Tiles(NamedTuple):
    """The `Config` of each kernel; `triangle` is of a backward with `is_causal`."""

    forward: dict[str, Any]
    backward: dict[str, int]
    triangle: dict[str, int]


def _backward_tiles(block: int, other: int, stages: int) -> dict[str, int]:
    """Returns a `Config` with `block` rows that stay, and tiles of `other` beside."""
    return {
        "block_q_dq": block,
        "block_kv_dq": other,
        "block_q_dkv": other,
        "block_kv_dkv": block,
        "num_stages": stages,
    }


def tiles(generation: str, head: int, is_capped: bool) -> Tiles:
    """Returns tokamax's own for Hopper, else the largest that spill nothing."""
    if generation == "sm90":
        block = 128 if head <= 128 else 64
        forward = {"block_q": 64, "block_kv": block, "num_stages": 2}
        backward = _backward_tiles(64, 64, 2)
        return Tiles(forward, backward, backward)
    stages = max(256 // head, 1)
    forward = {
        "block_q": 128,
        "block_kv": 128,
        "num_stages": stages,
        "collective": False,
    }
    # Of 128 x 128, the kernel with `is_causal` spills 1088 bytes, and with a cap 736.
    triangle = _backward_tiles(TILE, 64, 2)
    is_large = head <= 128 and not is_capped
    backward = _backward_tiles(TILE, 128, 2) if is_large else triangle
    return Tiles(forward, backward, triangle)


def installed() -> Modules:
    """Imports the modules for the GPU that is compiled for.

    Raises:
      NotImplementedError: there are none for it, or not the tested version.
    """
    kind = device_kind()
    if not (is_blackwell(kind) or is_hopper(kind)):
        raise NotImplementedError(
            "tokamax needs an H100, H200, B200 or GB200 GPU, or a mesh that describes "
            f"one, got {kind!r}: name another implementation, or none"
        )
    version = installed_version()
    if version != TESTED:
        raise NotImplementedError(
            f"tokamax must be {TESTED}, got {version}: pip install "
            "'annulus-attention[tokamax]', or name another implementation"
        )
    generation = "sm100" if is_blackwell(kind) else "sm90"
    name = "tokamax._src.ops.attention.pallas_mosaic_gpu"
    forward = importlib.import_module(f"{name}_kernel_{generation}")
    backward = importlib.import_module(f"{name}_vjp_kernel_{generation}")
    return Modules(generation, forward, backward)


@dataclass(frozen=True)
class TokamaxForwardSteps(PlainForm):
    """Forward steps of queries (B, L, H, D): see `backends.steps`."""

    modules: Modules
    scores: Scores
    q: jax.Array

    @jax.named_scope("flash_forward")  # as plans look for it
    def attend(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: tuple[jax.Array, jax.Array],
        carry: Partial | None,
    ) -> Partial:
        """Runs the kernel, and merges."""
        options = _tiles(self.modules, self.q, self.scores).forward
        kernel = functools.partial(
            self.modules.forward.flash_attention_kernel,
            is_causal=False,
            logits_soft_cap=self.scores.soft_cap,
            logits_scale=self.scores.scale,
            out_dtype=jnp.dtype(jnp.float32),
            normalize_output=True,
            return_residuals=True,
            use_stable_softmax=True,
            rescale_threshold=1.0,
            config=self.modules.forward.Config(**options),
        )

        def attend_row(q, k, v, k_start, k_end):
            return kernel(q, k, v, None, None, k_start[None], k_end[None])

        k_start, k_end = _of_rows(self.q, prepared)
        out, (m, l) = jax.vmap(attend_row)(
            self.q, _padded(k), _padded(v), k_start, k_end
        )
        partial = out, jnp.where(l > 0, m + jnp.log(l), -jnp.inf)
        return partial if carry is None else merge(carry, partial)


@dataclass(frozen=True)
class TokamaxBackwardSteps(PlainForm):
    """Backward steps of queries: see `backends.steps`.

    lse: (B, H, L), 1e9 in rows without keys, whose P is 0 then. out: see `_out`.
    """

    modules: Modules
    scores: Scores
    q: jax.Array
    do: jax.Array
    lse: jax.Array
    out: jax.Array

    def prepare(
        self, k_start: jax.Array, k_end: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns bounds, and whether no query sees a key after its own slot."""
        own_end = jnp.arange(1, k_end.shape[1] + 1)
        return k_start, k_end, ((k_end <= own_end) | (k_end <= k_start)).all()

    def add(
        self,
        k: jax.Array,
        v: jax.Array,
        prepared: tuple[jax.Array, jax.Array, jax.Array],
        dq: jax.Array,
        dkv: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the kernels, and adds what they return to the sums."""
        keys = k.shape[1]
        *bounds, is_triangle = prepared
        k_start, k_end = _of_rows(self.q, (bounds[0], bounds[1]))
        k = _padded(k)  # (B, S, K, D)
        v = _padded(v)  # (B, S, K, D)
        operands = self.q, k, v, self.lse, self.out, self.do, k_start, k_end
        all_tiles = functools.partial(self._gradients, False)
        # The kernels skip tiles by `is_causal` alone. With it they leave dk and dv of
        # keys behind the last query unwritten.
        if k.shape[1] > -(-self.q.shape[1] // TILE) * TILE:
            gradients = all_tiles(operands)
        else:
            half = functools.partial(self._gradients, True)
            gradients = lax.cond(is_triangle, half, all_tiles, operands)
        new_dq, dk, dv = (x.astype(jnp.float32) for x in gradients)
        # The ring multiplies by the scale at its end. Of one that a GPU takes for 0
        # nothing is left then.
        scale = self.scores.scale
        unscaled = 1 / scale if abs(scale) >= SMALLEST else 0.0
        dk = dk[:, :keys] * unscaled  # (B, S, K, D)
        return dq + new_dq * unscaled, *added(dkv, (dk, dv[:, :keys]))

    @jax.named_scope("flash_backward")
    def _gradients(
        self, is_causal: bool, operands: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Runs the kernels on all tiles, or on those up to the diagonal."""
        options = _tiles(self.modules, self.q, self.scores)
        chosen = options.triangle if is_causal else options.backward
        kernel = functools.partial(
            self.modules.backward.flash_attention_vjp_kernel,
            logits_scale=self.scores.scale,
            logits_soft_cap=self.scores.soft_cap,
            is_causal=is_causal,
            ds_dtype=None,
            config=self.modules.backward.Config(**chosen),
        )

        def of_row(q, k, v, lse, out, do, k_start, k_end):
            residuals = lse, jnp.ones_like(lse)  # m and l
            bounds = k_start[None], k_end[None]
            return kernel(q, k, v, residuals, out, do, None, None, *bounds)[:3]

        return jax.vmap(of_row)(*operands)


@dataclass(frozen=True)
class Launch(Kernels):
    """The backend. modules: stand-ins for tests; by default those of tokamax."""

    modules: Modules | None = None

    def forward_steps(
        self, q: jax.Array, k: jax.Array, visible: Visible, scores: Scores
    ) -> TokamaxForwardSteps:
        """Takes queries, (B, L, H, D).

        Raises:
          ValueError: a type that the kernels do not multiply.
          NotImplementedError: a head that is too large, no GPU of theirs, no tokamax.
        """
        del k, visible
        _check(q)
        # The kernel takes maxima before it scales: q has the sign of the scale. A
        # scale of 0 would make nan of a masked score of -inf.
        q = -q if scores.scale < 0 else q
        scores = scores._replace(scale=max(abs(scores.scale), SMALLEST))
        return TokamaxForwardSteps(self.modules or installed(), scores, q)

    def backward_steps(
        self, rows: Rows, k: jax.Array, visible: Visible, scores: Scores
    ) -> TokamaxBackwardSteps:
        """Takes q, do, lse and delta; errors as of `forward_steps`."""
        del k, visible
        _check(rows.q)
        do, out = _out(rows.do, rows.delta)
        lse = jnp.where(rows.lse == -jnp.inf, 1e9, rows.lse)
        modules = self.modules or installed()
        return TokamaxBackwardSteps(modules, scores, rows.q, do, lse, out)


def _out(do: jax.Array, delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns do (B, T, H, D) and an `out` whose product with it sums up to delta.

    The kernels compute delta (B, H, T) from `out`, and read nothing else of it; less
    the gradient of lse it is not that of the real one. The largest number of a row
    takes all of it. If that is 0, as where lse alone has a gradient, it is made tiny.
    """
    column = jnp.abs(do).argmax(-1, keepdims=True)  # (B, T, H, 1)
    is_largest = jnp.arange(do.shape[-1]) == column  # (B, T, H, D)
    least = max(2.0**-100, float(jnp.finfo(do.dtype).smallest_subnormal))
    do = jnp.where(is_largest & (jnp.abs(do) < least), jnp.asarray(least, do.dtype), do)
    delta = jnp.swapaxes(delta, 1, 2)[..., None]  # (B, T, H, 1)
    return do, jnp.where(is_largest, delta / do.astype(jnp.float32), 0.0)


def _check(q: jax.Array) -> None:
    if q.dtype not in TYPES:
        raise ValueError(
            f"for tokamax, q.dtype must be bfloat16 or float16, got {q.dtype}: cast q, "
            "k and v, or name another implementation"
        )
    if q.shape[-1] > MAX_HEAD:
        raise NotImplementedError(
            f"tokamax has kernels for heads of up to {MAX_HEAD} numbers, got "
            f"{q.shape=}: name another implementation"
        )


def _tiles(modules: Modules, q: jax.Array, scores: Scores) -> Tiles:
    head = -(-q.shape[-1] // 64) * 64  # which the kernels pad to
    return tiles(modules.generation, head, scores.soft_cap is not None)


def _padded(x: jax.Array) -> jax.Array:
    """Pads keys (B, S, K, D) with zeros, which no bound reaches, to whole tiles."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE), (0, 0), (0, 0)))


def _of_rows(
    q: jax.Array, bounds: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns bounds (B or 1, T) with a row of their own for each of the batch."""
    k_start, k_end = bounds
    shape = q.shape[:2]
    return jnp.broadcast_to(k_start, shape), jnp.broadcast_to(k_end, shape)
