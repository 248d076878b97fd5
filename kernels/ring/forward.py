"""The forward pass of a ring: attends to each chunk while it moves on.

Two chunks of heads, a and b, one each way round (Ring Attention, 2310.01889):

                  step 0         step 1             step 2             step 3
    device 1      own a, b       a of 0, b of 2     a of 3, b of 3     a of 2, b of 0
    meanwhile     a -> 2, b -> 0   -> 2, -> 0         -> 2, -> 0
"""

import functools
from typing import Any

import jax
from jax import lax

from ..backends.steps import CommonForward, forward_steps, nothing
from ..masks import Visible
from .comm import Chunks, Pair, Pairs, Ring, Table, as_one, join


def forward(ring: Ring, q: jax.Array, kv: Pair, visible: Visible, length: int) -> Pair:
    """Attends with the local queries to the keys of the whole ring.

    length: of a shard.

    Returns:
      out (B, L, H, D) and lse (B, H, L) in float32.
    """
    chunks = Chunks.of(ring, kv, visible, length)
    queries = chunks.head_groups(q, axis=2)
    own, none = chunks.own(), [None] * len(queries)
    scores = ring.scores
    steps = {
        i: forward_steps(ring.backend, queries[chunks.group(i)], k, visible, scores)
        for i, (k, _) in own.items()
    }
    if len({k.shape[1] for k, _ in own.values()}) > 1:
        steps = {i: CommonForward(one) for i, one in steps.items()}
    tables = {i: chunks.table(i, one.prepare) for i, one in steps.items()}

    def attend(
        static_step: int, n: jax.Array | int, held: Pairs, partial: list
    ) -> list:
        """Attends to the chunks of a step, from the partial result of each group."""
        now = {i: tables[i].at(n) for i in chunks.attended(static_step)}
        return _attended(chunks, queries, steps, now, held, partial)

    def step(static_step: int, n: jax.Array | int, held: Pairs, partial: list) -> tuple:
        arriving = chunks.passed_on(held, static_step)
        partial = attend(static_step, n, held, partial)
        if arriving:
            # Without the barrier XLA may start all transfers at once, or late.
            (arriving, partial), _ = ring.barrier((arriving, partial))
        return arriving, partial

    def around(count: jax.Array | None) -> list:
        return chunks.run(step, (own, none), count)[1]

    count = ring.count(visible, length)
    if count is None:
        partial = around(None)
    else:
        alone = functools.partial(attend, 0, 0, own, none)
        partial = lax.cond(count > 0, lambda: around(count), alone)
    finish = {chunks.group(i): one.finish for i, one in steps.items()}
    out, lse = zip(*(finish[g](x) for g, x in enumerate(partial)), strict=True)
    return join(out, 2), join(lse, 1)


def _attended(
    chunks: Chunks,
    queries: list[jax.Array],
    steps: dict[int, Any],
    now: dict[int, Table],
    held: Pairs,
    partial: list,
) -> list:
    """Attends to chunks. steps: of the backend. held: keys and values that are here."""

    def attend(i: int, seen: Any, x: Any) -> Any:
        return steps[i].attend(*held[i], seen, x)

    def skip(i: int, x: Any) -> Any:
        return x or steps[i].begin(nothing(queries[chunks.group(i)]))

    def kernels(partial: list) -> list:
        partial = list(partial)
        for i, one in now.items():
            run, leave = (functools.partial(way, i) for way in (attend, skip))
            g = chunks.group(i)
            partial[g] = one.over_intervals(run, leave, partial[g])
        return partial

    def unseen(partial: list) -> list:
        number = {chunks.group(i): i for i in now}
        return [skip(number[g], x) for g, x in enumerate(partial)]

    return as_one(kernels, unseen, now, chunks.ring, partial)
