"""The backward pass of a ring: dq stays, dk and dv follow their keys one step behind.

A chunk of device 0 in a ring of four accelerators, which goes to the next device; K is
the kernel that computes its part of dq of the device's queries, and of dk and dv of the
chunk. Device 0 runs its own one for half of its queries at a time:

                  step 0        step 1        step 2        step 3        after
    device 0      K (first                                                K (second
                     half)                                                   half)
    device 1                    K
    device 2                                  K
    device 3                                                K
    keys             0 -> 1        1 -> 2        2 -> 3
    dk, dv                         0 -> 1        1 -> 2        2 -> 3        3 -> 0

So in step 2 device 2 sends the chunk's keys to 3, receives dk and dv that devices 0 and
1 have added up, and runs its kernel. A second chunk goes the other way meanwhile: its
keys from 2 to 1, its dk and dv from 3 to 2.

On accelerators the kernel computes new dk and dv while those of the step before travel,
and XLA adds the two. Half of the local block's queries are put off to a step after the
last one, or nothing would run beside the transfer that takes dk and dv home. On CPUs,
which wait for transfers in any case, dk and dv arrive before the kernel, which adds to
them in place, and nothing is put off.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..backends.steps import BackwardSteps, Rows, backward_steps
from ..devices.device import is_cpu
from ..masks import Visible
from ..merge import added
from .chunks import (
    BoundsTable,
    Chunks,
    Pair,
    Pairs,
    RingStep,
    join,
    of_groups,
    zeros_like,
)
from .comm import Ring
from .loop import ChunkSums, Sums, ring_loop, run_kernels


class Gradients(NamedTuple):
    """dq (B, L, H, D), dk and dv (B, L, K, D) of a device's shard, in float32.

    dq and dk are without the factor `scale`.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


class BackwardState(NamedTuple):
    """What a device has between two ring steps.

    kv: keys and values that are here, by the numbers of their chunks.
    dq: of each head group, in the backend's form.
    dkv: dk and dv so far, of the chunks that some step has attended to.
    """

    kv: Pairs
    dq: list[Any]
    dkv: Pairs


@dataclass(frozen=True)
class BackwardPass:
    """The backward pass of the queries of one device.

    zeros: dq of each head group before the first step, in the backend's form.
    kernels: a backend's `BackwardSteps`, by the numbers of chunks.
    tables: what these read of the bounds, of all ring steps (see `BoundsTable`).
    visitors: zeros for dk and dv of the chunks that only visit, if the steps are
      counted: the carry of a loop of unknown length has one form from the start on.
    count: ring steps after the first, where the program counts them.
    adds_in_place: whether dk and dv arrive before the kernel, which adds to them, as on
      a CPU.
    """

    chunks: Chunks
    zeros: list[Any]
    kernels: dict[int, BackwardSteps]
    tables: dict[int, BoundsTable]
    visitors: Pairs
    count: jax.Array | None
    adds_in_place: bool

    @classmethod
    def prepare(
        cls, ring: Ring, rows: Rows, kv: Pair, visible: Visible
    ) -> "BackwardPass":
        """Computes everything that does not depend on the keys that arrive.

        kv: own keys and values, (B, L, K, D). visible: (m, B or 1, L).
        """
        chunks = Chunks(ring, kv, visible)
        groups = split_rows(chunks, rows)
        count = ring.count_steps(visible, chunks.length)
        kernels = {}
        for number, (k, _) in chunks.own.items():
            group = groups[chunks.group(number)]
            kernels[number] = backward_steps(
                ring.backend, group, k, visible, ring.scores
            )
        adds_in_place = is_cpu()
        tables = {
            number: chunks.table(number, kernel.prepare, defers=not adds_in_place)
            for number, kernel in kernels.items()
        }
        # In lse's float32, whatever q is: rounded in each step, dq would lose more of
        # its small parts, the longer the ring.
        zeros = []
        for group, kernel in zip(groups, of_groups(chunks, kernels), strict=True):
            zeros.append(kernel.begin(jnp.zeros_like(group.q, group.lse.dtype)))
        visitors = {}
        for number, pair in chunks.own.items():
            if count is not None and chunks[number].first:
                visitors[number] = zeros_like(pair, zeros[0].dtype)
        return cls(chunks, zeros, kernels, tables, visitors, count, adds_in_place)

    def run(self) -> Gradients:
        """Returns the gradients of the device's shard."""
        if self.chunks.schedule.last == 0:
            dq, dkv = self._stay()
        elif self.count is None:
            dq, dkv = self._go_around()
        else:
            dq, dkv = lax.cond(self.count > 0, self._go_around, self._stay)
        kernels = of_groups(self.chunks, self.kernels)
        parts = [kernel.finish(x) for kernel, x in zip(kernels, dq, strict=True)]
        dq = join(parts, axis=2)
        dk, dv = self.chunks.join_gradients(dkv)
        gradients = Gradients(dq, dk, dv)
        if len(self.zeros) == 1:
            return gradients
        # Joined groups would pass the kernels' memory layout on to what reads them.
        return Gradients._make(map(self.chunks.ring.heads_first, gradients))

    def take(self, step: RingStep, state: BackwardState) -> BackwardState:
        """Takes a ring step: sends k, v, and after them dk, dv, beside the kernels."""
        kv = self.chunks.send_on(state.kv, step)
        arriving_dkv = self.chunks.send_gradients(state.dkv, step, self.count)
        is_sending = bool(kv or arriving_dkv)
        dkv = state.dkv | arriving_dkv
        if self.adds_in_place:
            return self._add_to_arrived(step, state, kv, dkv, is_sending)
        # From no dk and dv: those of the steps before are still on their way here.
        dq, new = self._run_kernels(step, state.kv, Sums(state.dq, {}))
        if is_sending:  # see `ForwardPass.take`
            held, dq = self.chunks.ring.barrier_with_dq((kv, dkv, new), dq)
            kv, dkv, new = held
        # Behind the barrier: a kernel that added would have to wait for their arrival.
        for number, pair in new.items():
            dkv = dkv | {number: added(dkv.get(number), pair)}
        return BackwardState(kv, dq, dkv)

    def _add_to_arrived(
        self,
        step: RingStep,
        state: BackwardState,
        kv: Pairs,
        dkv: Pairs,
        is_sending: bool,
    ) -> BackwardState:
        """Takes a ring step in the order of CPUs: kernels add to what has arrived.

        kv, dkv: those of the next step, and of this one. The step after the last only
          sends: nothing was put off.
        """
        dq = state.dq
        if step.like <= self.chunks.schedule.last:
            dq, dkv = self._run_kernels(step, state.kv, Sums(dq, dkv))
        if is_sending:
            (kv, dkv), dq = self.chunks.ring.barrier_with_dq((kv, dkv), dq)
        return BackwardState(kv, dq, dkv)

    def run_kernel(
        self, number: int, kv: Pair, prepared: Any, sums: ChunkSums
    ) -> ChunkSums:
        """Adds to dq of a head group, and to dk and dv of a chunk if it has some."""
        k, v = kv
        dq, dk, dv = self.kernels[number].add(
            k, v, prepared, sums.of_group, sums.of_chunk
        )
        return ChunkSums(dq, (dk, dv))

    def skip(self, number: int, kv: Pair, sums: ChunkSums) -> ChunkSums:
        """Returns the sums as they are, and zeros for a chunk without dk and dv."""
        dq, dkv = sums
        return ChunkSums(dq, zeros_like(kv, dq.dtype) if dkv is None else dkv)

    def _run_kernels(self, step: RingStep, kv: Pairs, sums: Sums) -> Sums:
        rows = self.chunks.rows(self.tables, step)
        return run_kernels(self, rows, kv, sums)

    def _go_around(self) -> tuple[list[Any], Pairs]:
        """Takes all ring steps, and the one after the last."""
        begin = BackwardState(self.chunks.own, self.zeros, self.visitors)
        state = ring_loop(self.chunks.schedule, self.take, begin, self.count)
        after = self.chunks.schedule.last + 1
        # The second half of the local block, on keys that never left.
        state = self.take(
            RingStep(after, like=after), state._replace(kv=self.chunks.own)
        )
        return state.dq, state.dkv

    def _stay(self) -> tuple[list[Any], Pairs]:
        """Computes the gradients of the device's own keys alone, of all its queries."""
        # Of all queries at once: no transfer is there for a second half to hide.
        tables = {
            number: self.chunks.table(number, kernel.prepare)
            for number, kernel in self.kernels.items()
            if self.chunks[number].first == 0
        }
        rows = self.chunks.rows(tables, RingStep(0, like=0))
        sums = run_kernels(self, rows, self.chunks.own, Sums(self.zeros, {}))
        return sums.groups, sums.chunks | self.visitors


def split_rows(chunks: Chunks, rows: Rows) -> list[Rows]:
    """Cuts q, do, lse and delta into the head groups of a ring's chunks."""
    q = chunks.split_heads(rows.q, axis=2)
    do = chunks.split_heads(rows.do, axis=2)
    lse = chunks.split_heads(rows.lse, axis=1)
    delta = chunks.split_heads(rows.delta, axis=1)
    return [Rows._make(parts) for parts in zip(q, do, lse, delta, strict=True)]
