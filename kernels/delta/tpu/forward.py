"""What queries read of a state and the state after them, on a TPU: the forward kernel.

A program walks over the chunks of G value heads of a row, which read one key head:

    grid (row, heads) in parallel, chunks in order
    HBM -> VMEM   q, k, v, gates of the next chunk        Pallas' own pipeline
    VMEM          states of G heads: the block of the last states, held by all chunks
    VMEM -> HBM   out; for gradients the state before the chunk, and its inverse
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...backends.tpu.vector import TN
from .chunk import Gates, Triangles, inverses, product, scores


class Operands(NamedTuple):
    """Arrays of a pass over all chunks, their blocks, or references to these.

    q, k: [N, K, T, D]. v: [N, H, T, V]; bfloat16 or float32.
    gates: log decays of a program's heads and then their betas, [N, H / G, chunks, 2 G,
      C]. state: [N, H, D, W]. Both float32.
    """

    q: Any
    k: Any
    v: Any
    gates: Any
    state: Any

    @property
    def group(self) -> int:
        """Value heads of a program: G."""
        return self.gates.shape[3] // 2

    @property
    def grid(self) -> tuple[int, int, int]:
        """Rows, programs of a row, and chunks."""
        return self.gates.shape[:3]


class Blocks(NamedTuple):
    """Blocks of program (row, heads, chunk); those of a state stay for all chunks."""

    q: pl.BlockSpec  # [C, D], of all programs of a key head
    of_q: pl.BlockSpec  # [C, D], of a program
    v: pl.BlockSpec  # [G, C, V]
    gates: pl.BlockSpec  # [2 G, C]
    state: pl.BlockSpec  # [G, D, W]
    out: pl.BlockSpec  # [G, C, W]
    states: pl.BlockSpec  # [G, D, W]
    inverses: pl.BlockSpec  # [G, C, C]

    @classmethod
    def of(cls, operands: Operands, is_backward: bool = False) -> "Blocks":
        """Returns the blocks. is_backward: whether the last chunk comes first."""
        _, programs, chunks = operands.grid
        group = operands.group
        size = operands.gates.shape[-1]
        depth, width = operands.state.shape[2:]
        of_key_head = programs // operands.q.shape[1]  # programs

        def at(c: Any) -> Any:
            return chunks - 1 - c if is_backward else c

        def tokens(columns: int) -> pl.BlockSpec:
            shape = None, group, size, columns
            return pl.BlockSpec(shape, lambda n, h, c: (n, h, at(c), 0))

        def of_chunk(*shape: int) -> pl.BlockSpec:
            within = (0,) * len(shape)
            return pl.BlockSpec(
                (None, None, None, *shape), lambda n, h, c: (n, h, at(c), *within)
            )

        return cls(
            q=pl.BlockSpec(
                (None, None, size, depth),
                lambda n, h, c: (n, h // of_key_head, at(c), 0),
            ),
            of_q=pl.BlockSpec(
                (None, None, size, depth), lambda n, h, c: (n, h, at(c), 0)
            ),
            v=tokens(operands.v.shape[-1]),
            gates=of_chunk(2 * group, size),
            state=pl.BlockSpec(
                (None, group, depth, width), lambda n, h, c: (n, h, 0, 0)
            ),
            out=tokens(width),
            states=of_chunk(group, depth, width),
            inverses=of_chunk(group, size, size),
        )


class Results(NamedTuple):
    """What the forward kernel writes.

    out: [N, H, T, W], in the type of v. state: [N, H, D, W].
    states, inverses: for gradients, the state before each chunk, and the inverse of its
      writes, [N, H / G, chunks, G, D, W] and [N, H / G, chunks, G, C, C], float32.
    """

    out: Any
    state: Any
    states: Any = ()
    inverses: Any = ()


def forward_call(operands: Operands, is_saving: bool, **options: Any) -> Results:
    """Runs the kernel. is_saving: whether gradients follow. options: of pallas_call."""
    blocks = Blocks.of(operands)
    batch, heads, tokens, _ = operands.v.shape
    depth, width = operands.state.shape[2:]
    size = operands.gates.shape[-1]
    of_chunks = *operands.grid, operands.group
    shapes = Results(
        out=jax.ShapeDtypeStruct((batch, heads, tokens, width), operands.v.dtype),
        state=jax.ShapeDtypeStruct(operands.state.shape, jnp.float32),
    )
    out_blocks = Results(blocks.out, blocks.state)
    if is_saving:
        states = jax.ShapeDtypeStruct((*of_chunks, depth, width), jnp.float32)
        inverses = jax.ShapeDtypeStruct((*of_chunks, size, size), jnp.float32)
        shapes = shapes._replace(states=states, inverses=inverses)
        out_blocks = out_blocks._replace(states=blocks.states, inverses=blocks.inverses)
    in_blocks = Operands(blocks.q, blocks.q, blocks.v, blocks.gates, blocks.state)
    call = pl.pallas_call(
        functools.partial(_kernel, is_saving),
        name="delta_forward",
        grid=operands.grid,
        in_specs=[in_blocks],
        out_specs=out_blocks,
        out_shape=shapes,
        **options,
    )
    return call(operands)


def _kernel(is_saving: bool, operands: Operands, *references: Any) -> None:
    """Takes one chunk of G heads: program (row, heads, chunk)."""
    results = Results(*references)

    @pl.when(pl.program_id(2) == 0)
    def _begin() -> None:
        results.state[...] = operands.state[...]

    size = operands.q.shape[0]
    masks = Triangles.of(size)
    q = operands.q[...]  # [C, D]
    k = operands.k[...]  # [C, D]
    of_queries, of_keys = scores(q, k)  # [C, C] each
    read = jnp.concatenate([k, q])  # [2 C, D]
    heads = range(operands.v.shape[0])
    # Step by step for all heads: while one waits for a product, the next one goes on.
    gates = [Gates.of(operands.gates, head, masks) for head in heads]
    # Of a write less its beta: (I + decay of_keys beta) written = v - what k reads.
    systems = [each.decay * of_keys * each.beta for each in gates]  # [C, C]
    systems = [jnp.where(masks.before, system, 0.0) for system in systems]  # [C, C]
    solve = inverses(systems)  # [C, C] each
    states = [results.state[head] for head in heads]  # [D, W] each
    from_state = [product(read, state) for state in states]  # [2 C, W]
    written = []
    for head in heads:
        kept = from_state[head][:size] * gates[head].kept  # [C, W]
        right = padded(operands.v[head], kept.shape[1]) - kept  # [C, W]
        product_of_right = product(solve[head], right)  # [C, W]
        written.append(gates[head].beta_column * product_of_right)
    for head in heads:
        out = gates[head].kept * from_state[head][size:]  # [C, W]
        out += product(gates[head].decay * of_queries, written[head])  # [C, W]
        results.out[head] = out.astype(results.out.dtype)
        new = product(k, gates[head].last * written[head], TN)  # [D, W]
        results.state[head] = gates[head].stays * states[head] + new
        if is_saving:
            results.states[head] = states[head]
            results.inverses[head] = solve[head]


def padded(v: jax.Array, width: int) -> jax.Array:
    """Returns v (C, V) as [C, W], float32: the columns of a map have no values."""
    v = v.astype(jnp.float32)
    missing = width - v.shape[1]
    if not missing:
        return v
    return jnp.concatenate([v, jnp.zeros((v.shape[0], missing), jnp.float32)], axis=1)
