"""Gradients of the gated delta rule on a TPU: the backward kernel.

The grid is the forward kernel's, with the last chunk first. The states before chunks
and the inverses of their writes come from the forward; the gradient of the state, after
a chunk and then before it, stays in VMEM: it is the block of the first state's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...backends.tpu.vector import NT, TN
from .chunk import Gates, Triangles, product, scores
from .forward import Blocks, Operands, padded


class Held(NamedTuple):
    """What the backward kernel reads beside `Operands`.

    states, inverses: as of `forward.Results`. out, state: the gradients of those,
      [N, H, T, W] and [N, H, D, W].
    """

    states: Any
    inverses: Any
    out: Any
    state: Any


def backward_call(operands: Operands, held: Held, **options: Any) -> Operands:
    """Runs the kernel. options: of pallas_call.

    Returns:
      gradients; those of q and k of a program's heads alone, [N, H / G, T, D].
    """
    blocks = Blocks.of(operands, is_backward=True)
    batch, programs, _ = operands.grid
    _, key_heads, tokens, depth = operands.q.shape
    # Summed in XLA over the programs of a key head.
    keys = operands.q.dtype if programs == key_heads else jnp.float32
    of_keys = jax.ShapeDtypeStruct((batch, programs, tokens, depth), keys)
    call = pl.pallas_call(
        _kernel,
        name="delta_backward",
        grid=operands.grid,
        in_specs=[
            # Of the state its gradient alone is read.
            Operands(blocks.q, blocks.q, blocks.v, blocks.gates, ()),
            Held(blocks.states, blocks.inverses, blocks.out, blocks.state),
        ],
        out_specs=Operands(
            blocks.of_q, blocks.of_q, blocks.v, blocks.gates, blocks.state
        ),
        out_shape=Operands(
            q=of_keys,
            k=of_keys,
            v=jax.ShapeDtypeStruct(operands.v.shape, operands.v.dtype),
            gates=jax.ShapeDtypeStruct(operands.gates.shape, jnp.float32),
            state=jax.ShapeDtypeStruct(operands.state.shape, jnp.float32),
        ),
        **options,
    )
    return call(operands._replace(state=()), held)


def _kernel(operands: Operands, held: Held, *references: Any) -> None:
    """Takes one chunk of G heads back: program (row, heads, chunk)."""
    gradients = Operands(*references)

    @pl.when(pl.program_id(2) == 0)
    def _begin() -> None:
        gradients.state[...] = held.state[...]

    size = operands.q.shape[0]
    masks = Triangles.of(size)
    q = operands.q[...]  # [C, D]
    k = operands.k[...]  # [C, D]
    of_queries, of_keys = scores(q, k)  # [C, C] each
    read = jnp.concatenate([k, q])  # [2 C, D]
    heads = range(operands.v.shape[0])
    gates = [Gates.of(operands.gates, head, masks) for head in heads]
    # Forward again, step by step for all heads (see `forward`).
    before = [product(read, held.states[head]) for head in heads]  # [2 C, W] each
    solved = []
    for head in heads:
        kept = gates[head].kept * before[head][:size]  # [C, W]
        right = padded(operands.v[head], kept.shape[1]) - kept  # [C, W]
        solved.append(product(held.inverses[head], right))  # [C, W]
    written = [gates[head].beta_column * solved[head] for head in heads]  # [C, W]
    # Backward: of what is written, and of what it was solved from.
    ahead = [gradients.state[head] for head in heads]  # [D, W] each
    from_ahead = [product(k, ahead[head]) for head in heads]  # [C, W] each
    d_written = []
    for head in heads:
        read_scores = gates[head].decay * of_queries  # [C, C]
        later = product(read_scores, held.out[head], TN)  # [C, W]
        d_written.append(later + gates[head].last * from_ahead[head])
    d_right = []
    for head in heads:
        d_solved = gates[head].beta_column * d_written[head]  # [C, W]
        d_right.append(product(held.inverses[head], d_solved, TN))  # [C, W]
    d_read = jnp.zeros(read.shape, jnp.float32)  # [2 C, D], of keys and queries
    d_keys = jnp.zeros(k.shape, jnp.float32)  # [C, D]
    d_scores = jnp.zeros((2 * size, size), jnp.float32)  # [2 C, C]
    for head in heads:
        out = held.out[head].astype(jnp.float32)  # [C, W]
        state = held.states[head]  # [D, W]
        d_before = jnp.concatenate(
            [-gates[head].kept * d_right[head], gates[head].kept * out]
        )  # [2 C, W]
        d_read += product(d_before, state, NT)
        d_keys += gates[head].last * product(written[head], ahead[head], NT)
        gradients.v[head] = d_right[head][:, : operands.v.shape[2]].astype(
            gradients.v.dtype
        )
        gradients.state[head] = gates[head].stays * ahead[head] + product(
            read, d_before, TN
        )
        d_system = -product(d_right[head], solved[head], NT)  # [C, C]
        d_system = jnp.where(masks.before, d_system, 0.0)
        d_read_scores = product(held.out[head], written[head], NT)  # [C, C]
        system = gates[head].decay * of_keys  # [C, C], without beta
        d_decay = d_read_scores * gates[head].decay * of_queries  # [C, C], times decay
        of_beta = d_system * system  # [C, C]
        d_decay += of_beta * gates[head].beta
        d_scores += jnp.concatenate(
            [d_system * gates[head].beta, d_read_scores]
        ) * jnp.concatenate([gates[head].decay, gates[head].decay])
        # The decays of the state until a token, and from a token until the end.
        d_kept = (out * before[head][size:]).sum(axis=1, keepdims=True)  # [C, 1]
        d_kept -= (d_right[head] * before[head][:size]).sum(axis=1, keepdims=True)
        d_stays = (state * ahead[head]).sum(keepdims=True)  # [1, 1]
        is_last = masks.row == size - 1
        until = gates[head].kept * (d_kept + jnp.where(is_last[:, :1], d_stays, 0.0))
        after = (written[head] * from_ahead[head]).sum(axis=1, keepdims=True)
        after = gates[head].last * after  # [C, 1]
        pairs = product(d_decay, masks.at_most.astype(jnp.bfloat16), TN)  # [C, C]
        d_log_decay = jnp.where(masks.at_most, until, pairs + after)  # [C, C]
        gradients.gates[head : head + 1] = d_log_decay.sum(axis=0, keepdims=True)
        direct = (d_written[head] * solved[head]).sum(axis=1, keepdims=True)  # [C, 1]
        of_beta += jnp.where(masks.diagonal, direct, 0.0)
        beta = len(heads) + head
        gradients.gates[beta : beta + 1] = of_beta.sum(axis=0, keepdims=True)
    d_read += product(d_scores, k)  # [2 C, D]
    d_keys += product(d_scores, read, TN)  # [C, D]
    gradients.q[...] = d_read[size:].astype(gradients.q.dtype)
    gradients.k[...] = (d_read[:size] + d_keys).astype(gradients.k.dtype)
