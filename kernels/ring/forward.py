"""The forward pass of a ring: attend to the keys that are here while others arrive.

Queries stay, and keys and values go around. Of a ring of four, device 0 and a chunk
that goes to the next device:

                   step 0        step 1        step 2        step 3
    kernel on      own k, v      k, v of 3     k, v of 2     k, v of 1
    sends          own to 1      of 3 to 1     of 2 to 1

With two chunks, one each way round, a step sends both and then runs both kernels: in
step 1 on k, v of 3 in the first chunk and k, v of 1 in the second one.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
from jax import lax

from ..backends.steps import CommonForward, ForwardSteps, forward_steps, nothing
from ..masks import Visible
from .chunks import BoundsTable, Chunks, Pair, Pairs, RingStep, join, of_groups
from .comm import Ring
from .loop import ChunkSums, Sums, ring_loop, run_kernels


class ForwardState(NamedTuple):
    """What a device has between two ring steps.

    kv: keys and values that are here, by the numbers of their chunks.
    partial: the result so far of each head group, in the backend's form; None before
      the first step.
    """

    kv: Pairs
    partial: list[Any]


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass of the queries of one device.

    queries: (B, L, heads of the group, D), of each head group.
    kernels: a backend's `ForwardSteps`, by the numbers of chunks.
    tables: what these read of the bounds, of all ring steps (see `BoundsTable`).
    count: ring steps after the first, where the program counts them.
    """

    chunks: Chunks
    queries: list[jax.Array]
    kernels: dict[int, ForwardSteps]
    tables: dict[int, BoundsTable]
    count: jax.Array | None

    @classmethod
    def prepare(
        cls, ring: Ring, q: jax.Array, kv: Pair, visible: Visible, may_round: bool
    ) -> "ForwardPass":
        """Computes everything that does not depend on the keys that arrive.

        q: (B, L, H, D). kv: own keys and values, (B, L, K, D). visible: (m, B or 1, L).
        may_round: whether a kernel may round out to q's type: nothing is added to it.
        """
        chunks = Chunks(ring, kv, visible)
        queries = chunks.split_heads(q, axis=2)
        kernels: dict[int, ForwardSteps] = {}
        for number, (k, _) in chunks.own.items():
            group = queries[chunks.group(number)]
            kernel: Any = forward_steps(ring.backend, group, k, visible, ring.scores)
            if may_round and chunks.has_one_kernel and hasattr(kernel, "out_type"):
                kernel = replace(kernel, out_type=q.dtype)
            # Chunks of different length are tiled differently, and so would be the
            # partial results that they pass to each other.
            kernels[number] = kernel if chunks.are_alike else CommonForward(kernel)
        tables = {
            number: chunks.table(number, kernel.prepare)
            for number, kernel in kernels.items()
        }
        count = ring.count_steps(visible, chunks.length)
        return cls(chunks, queries, kernels, tables, count)

    def run(self) -> Pair:
        """Returns out (B, L, H, D) and lse (B, H, L) over all keys, in float32."""
        if self.count is None:
            partial = self._go_around()
        else:
            # A counted loop takes two steps at least, here one too many: it would
            # attend to another shard by the bounds of the own one.
            partial = lax.cond(self.count > 0, self._go_around, self._stay)
        outs = []
        lses = []
        kernels = of_groups(self.chunks, self.kernels)
        for kernel, result in zip(kernels, partial, strict=True):
            out, lse = kernel.finish(result)
            outs.append(out)
            lses.append(lse)
        return join(outs, axis=2), join(lses, axis=1)

    def take(self, step: RingStep, state: ForwardState) -> ForwardState:
        """Takes a ring step: sends k and v on, and attends to them meanwhile."""
        arriving = self.chunks.send_on(state.kv, step)
        partial = self._attend(step, state)
        if arriving:
            # Without the barrier XLA may start all transfers at once, and hold all
            # shards; or late, with nothing left to run beside them.
            arriving, partial = self.chunks.ring.barrier((arriving, partial))
        return ForwardState(arriving, partial)

    def run_kernel(
        self, number: int, kv: Pair, prepared: Any, sums: ChunkSums
    ) -> ChunkSums:
        """Attends to a chunk, going on from the partial result of its head group."""
        k, v = kv
        partial = self.kernels[number].attend(k, v, prepared, sums.of_group)
        return ChunkSums(partial, None)

    def skip(self, number: int, kv: Pair, sums: ChunkSums) -> ChunkSums:
        """Returns the partial result as it is; if there is none, that of no keys."""
        del kv
        if sums.of_group is not None:
            return ChunkSums(sums.of_group, None)
        queries = self.queries[self.chunks.group(number)]
        return ChunkSums(self.kernels[number].begin(nothing(queries)), None)

    @property
    def _start(self) -> ForwardState:
        return ForwardState(self.chunks.own, [None] * len(self.queries))

    def _go_around(self) -> list[Any]:
        state = ring_loop(self.chunks.schedule, self.take, self._start, self.count)
        return state.partial

    def _stay(self) -> list[Any]:
        """Attends to the device's own keys alone."""
        return self._attend(RingStep(0, like=0), self._start)

    def _attend(self, step: RingStep, state: ForwardState) -> list[Any]:
        rows = self.chunks.rows(self.tables, step)
        sums = Sums(state.partial, {})
        return run_kernels(self, rows, state.kv, sums).groups
