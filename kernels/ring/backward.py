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
keys from 2 to 1, its dk and dv from 3 to 2. Half of the local block's queries are put
off to a step after the last one, or nothing would run beside the transfer that takes dk
and dv home. In which order the rest of a step goes is a `StepOrder`. Between TPUs two
chunks, a and b, take turns, and what travels for the one does so beside the kernel of
the other:

                  step 1, first half         second half             step 2, first half
    kernel        a: adds to its dk, dv      b: adds to its own      a
    keys          a go on                    b go on                 a
    dk, dv        b of step 0 go on          a of step 1 go on       b of step 1

Their loop goes from the second half of a step to the first half of the next one.
"""

from dataclasses import dataclass, replace
from enum import Enum, auto
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
from .routes import AllShards, backward_route


class Gradients(NamedTuple):
    """dq (B, L, H, D), dk and dv (B, L, K, D) of a device's shard, in float32.

    dq and dk are without the factor `scale`; with it where a kernel has `rounded` them.
    """

    dq: jax.Array
    dk: jax.Array
    dv: jax.Array


class StepOrder(Enum):
    """When a ring step's kernels run, and when dk and dv of the step before arrive."""

    TAKE_TURNS = auto()
    """Two chunks take turns: dk and dv of the one arrive beside the kernel of the
    other, and its own next kernel adds to them in place."""

    ADD_AFTER = auto()
    """The kernels compute new dk and dv while those so far travel; XLA adds the two."""

    ARRIVE_FIRST = auto()
    """The kernels wait for dk and dv and add to them in place, and nothing is put off:
    CPUs wait for transfers in any case."""

    @classmethod
    def of(cls, chunks: Chunks) -> "StepOrder":
        """Returns the order for the chunks of a `backward_route`."""
        if is_cpu():
            return cls.ARRIVE_FIRST
        route = chunks.ring.route
        # A single key/value head of a few slots is not cut in two.
        is_cut = len(chunks.schedule.chunks) == 2
        if isinstance(route, AllShards) and route.takes_turns and is_cut:
            return cls.TAKE_TURNS
        return cls.ADD_AFTER

    def defers(self, number: int) -> bool:
        """Returns whether half of a chunk's local queries are put off to the end."""
        # Of two that take turns, the first is home before that; the second comes home
        # beside its kernel.
        if self is StepOrder.TAKE_TURNS:
            return number == 0
        return self is StepOrder.ADD_AFTER


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
    dkv_zeros: dk and dv that the first step finds. If steps are counted, of the chunks
      that only visit: the carry of a loop of unknown length has one form from the start
      on. If two take turns, of both: all steps run one kernel.
    count: ring steps after the first, where the program counts them.
    """

    chunks: Chunks
    zeros: list[Any]
    kernels: dict[int, BackwardSteps]
    tables: dict[int, BoundsTable]
    dkv_zeros: Pairs
    count: jax.Array | None
    order: StepOrder

    @classmethod
    def prepare(
        cls, ring: Ring, rows: Rows, kv: Pair, visible: Visible
    ) -> "BackwardPass":
        """Computes everything that does not depend on the keys that arrive.

        kv: own keys and values, (B, L, K, D). visible: (m, B or 1, L).
        """
        _, length, heads, _ = rows.q.shape
        rows_of_key = length * heads // kv[0].shape[2]
        ring = replace(ring, route=backward_route(ring.route, rows_of_key))
        chunks = Chunks(ring, kv, visible)
        groups = split_rows(chunks, rows)
        count = ring.count_steps(visible, chunks.length)
        kernels = {}
        for number, (k, _) in chunks.own.items():
            group = groups[chunks.group(number)]
            kernel: Any = backward_steps(ring.backend, group, k, visible, ring.scores)
            if chunks.has_one_kernel and hasattr(kernel, "dk_scale"):
                kernel = replace(kernel, dk_scale=ring.scale)
            kernels[number] = kernel
        order = StepOrder.of(chunks)
        tables = {
            number: chunks.table(number, kernel.prepare, defers=order.defers(number))
            for number, kernel in kernels.items()
        }
        # In lse's float32, whatever q is: rounded in each step, dq would lose more of
        # its small parts, the longer the ring.
        zeros = []
        for group, kernel in zip(groups, of_groups(chunks, kernels), strict=True):
            zeros.append(kernel.begin(jnp.zeros_like(group.q, group.lse.dtype)))
        dkv_zeros = {}
        for number, pair in chunks.own.items():
            is_counted_visitor = count is not None and chunks[number].first > 0
            if order is StepOrder.TAKE_TURNS or is_counted_visitor:
                dkv_zeros[number] = zeros_like(pair, zeros[0].dtype)
        return cls(chunks, zeros, kernels, tables, dkv_zeros, count, order)

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
        if self.order is StepOrder.TAKE_TURNS:
            # The first chunk's turn of this step has been taken.
            state = self._take_turn(1, step, state)
            return self._take_turn(0, step.next, state)
        kv = self.chunks.send_on(state.kv, step)
        arriving_dkv = self.chunks.send_gradients(state.dkv, step, self.count)
        is_sending = bool(kv or arriving_dkv)
        dkv = state.dkv | arriving_dkv
        if self.order is StepOrder.ARRIVE_FIRST:
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

    def _take_turn(
        self, number: int, step: RingStep, state: BackwardState
    ) -> BackwardState:
        """Takes half of a ring step, of two: runs the kernel of one of the chunks.

        Meanwhile its keys go on, and dk and dv of the other chunk, which that one's
        last kernel added to: in this step if that was the first half, else in the step
        before.
        """
        other = 1 - number
        # After the last step, keys that have not come home: those that never left.
        kv = {number: state.kv.get(number, self.chunks.own[number])}
        arriving = self.chunks.send_on(kv, step)
        leaves_after = step._replace(like=step.like + number)
        other_dkv = {other: state.dkv[other]}
        travelling = self.chunks.send_gradients(other_dkv, leaves_after, self.count)
        row = {number: self.chunks.rows(self.tables, step)[number]}
        sums = run_kernels(self, row, kv, Sums(state.dq, {number: state.dkv[number]}))
        # Held back too: if these keys left now, they would share a link with dk and dv
        # of their chunk.
        waiting = {i: pair for i, pair in state.kv.items() if i != number}
        held = waiting, arriving, travelling, sums.chunks
        held, dq = self.chunks.ring.barrier_with_dq(held, sums.groups)
        waiting, arriving, travelling, new = held
        return BackwardState(waiting | arriving, dq, other_dkv | travelling | new)

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
        begin = BackwardState(self.chunks.own, self.zeros, self.dkv_zeros)
        if self.order is StepOrder.TAKE_TURNS:
            begin = self._take_turn(0, RingStep(0, like=0), begin)
        state = ring_loop(self.chunks.schedule, self.take, begin, self.count)
        if self.order is StepOrder.TAKE_TURNS:
            return state.dq, state.dkv
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
        return sums.groups, self.dkv_zeros | sums.chunks


def split_rows(chunks: Chunks, rows: Rows) -> list[Rows]:
    """Cuts q, do, lse and delta into the head groups of a ring's chunks."""
    q = chunks.split_heads(rows.q, axis=2)
    do = chunks.split_heads(rows.do, axis=2)
    lse = chunks.split_heads(rows.lse, axis=1)
    delta = chunks.split_heads(rows.delta, axis=1)
    return [Rows._make(parts) for parts in zip(q, do, lse, delta, strict=True)]
