"""The gated delta rule on a TPU: lays out its operands, and has its gradients."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...backends.tpu.block_sizes import vmem_limit
from . import CHUNK
from .backward import Held, backward_call
from .chunk import BARRIER
from .forward import Operands, forward_call

MOST_HEADS = 2
"""Value heads of a program: while one waits for a product, the other goes on."""


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    is_first: jax.Array,
    state: jax.Array,
    interpret: bool | pltpu.InterpretParams = False,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Returns out and the state as of `rule.gated_delta`; out in the type of v.

    interpret: whether (or how) Pallas interprets the kernels, on any device.
    chunk: tokens of a chunk, C: a power of 2 from 8 on.
    """
    lead = q.shape[:-3]
    tokens, heads = v.shape[-3:-1]
    shared = heads // k.shape[-2]
    group = math.gcd(shared, MOST_HEADS)

    def of_heads(x: jax.Array) -> jax.Array:
        """Lays out (…, T, heads, size) as [N, heads, whole chunks, size]."""
        x = x.reshape(-1, *x.shape[-3:])
        # Padding decays nothing and writes nothing: its log_decay and beta are 0.
        x = jnp.pad(x, [(0, 0), (0, -tokens % chunk), (0, 0), (0, 0)])
        return x.swapaxes(1, 2)

    log_decay = jnp.where(is_first[..., None], BARRIER, log_decay)
    gates = jnp.stack([log_decay, beta], axis=-1).astype(jnp.float32)  # (…, T, H, 2)
    gates = of_heads(gates)  # [N, H, T, 2]
    gates = gates.reshape(gates.shape[0], -1, group, gates.shape[2] // chunk, chunk, 2)
    gates = gates.transpose(0, 1, 3, 5, 2, 4)  # [N, H / G, chunks, 2, G, C]
    gates = gates.reshape(*gates.shape[:3], 2 * group, chunk)
    state = jnp.broadcast_to(state, (*lead, heads, *state.shape[-2:]))
    state = state.reshape(-1, *state.shape[-3:]).astype(jnp.float32)
    operands = Operands(of_heads(q), of_heads(k), of_heads(v), gates, state)
    out, state = _walk(interpret, operands)
    out = out[:, :, :tokens].swapaxes(1, 2)  # [N, T, H, W]
    return out.reshape(*lead, *out.shape[1:]), state.reshape(*lead, *state.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _walk(
    interpret: bool | pltpu.InterpretParams, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """Returns out [N, H, T, W] and the state [N, H, D, W] after all chunks."""
    results = forward_call(operands, False, **_options(operands, interpret, 5))
    return results.out, results.state


def _options(
    operands: Operands, interpret: bool | pltpu.InterpretParams, products: int
) -> dict[str, Any]:
    """Returns the options of a `pl.pallas_call`. products: with a state, of a chunk."""
    batch, heads, depth, width = operands.state.shape
    tokens = operands.q.shape[2]
    limit = None if interpret else vmem_limit(pltpu.get_tpu_info())
    read = sum(x.size * x.dtype.itemsize for x in operands)
    return {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=limit,
        ),
        "cost_estimate": pl.CostEstimate(
            flops=2 * products * batch * heads * tokens * depth * width,
            transcendentals=batch * heads * tokens * operands.gates.shape[-1],
            bytes_accessed=2 * read,
        ),
        "interpret": interpret,
    }


def _forward(
    interpret: bool | pltpu.InterpretParams, operands: Operands
) -> tuple[tuple[jax.Array, jax.Array], tuple[Operands, jax.Array, jax.Array]]:
    results = forward_call(operands, True, **_options(operands, interpret, 5))
    kept = operands, results.states, results.inverses
    return (results.out, results.state), kept


def _backward(
    interpret: bool | pltpu.InterpretParams,
    kept: tuple[Operands, jax.Array, jax.Array],
    ahead: tuple[jax.Array, jax.Array],
) -> tuple[Operands]:
    """Returns the gradients of operands; ahead: of out and of the last state."""
    operands, states, inverses = kept
    out, state = ahead
    held = Held(states, inverses, out, state)
    options = _options(operands, interpret, 13)
    gradients = backward_call(operands, held, **options)
    batch, key_heads, tokens, depth = operands.q.shape

    def of_key_heads(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, key_heads, -1, tokens, depth)
        return x.sum(axis=2).astype(operands.q.dtype)

    q = of_key_heads(gradients.q)
    k = of_key_heads(gradients.k)
    return (Operands(q, k, gradients.v, gradients.gates, gradients.state),)


_walk.defvjp(_forward, _backward)
