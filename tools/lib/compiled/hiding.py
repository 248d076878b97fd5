"""How much of a ring step's kernels hides a transfer, from the order of a schedule.

s and d are the start and the done of a transfer, F a kernel. In ssssFFdddd, ssssFFdddd
all transfers travel for as long as the ring step computes, in FssssFdddd for half of
it: what they could take of the other kernel's time is lost.

A step ends where transfers are done before any other starts, and with a loop of steps.
Its transfers could start where it begins, or later, once what they send has arrived or
is computed.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """Places of a transfer in the order of a computation's instructions.

    available: of the last kernel or done that what it sends depends on; -1 for none.
    """

    start: int
    done: int
    available: int = -1


def hidden_shares(
    kernels: Sequence[int], loops: Sequence[int], transfers: Sequence[Transfer]
) -> list[float]:
    """Returns the share of its ring step's kernels during which each transfer runs.

    Kernels count as equally long.

    kernels: their places, ascending. loops: those of them that are loops of kernels.
    """

    def gap(place: int) -> int:
        """Counts the kernels up to a place."""
        return bisect.bisect(kernels, place)

    crossing = [one for one in transfers if gap(one.start) < gap(one.done)]
    ends = _ends_of_steps([(gap(t.start), gap(t.done), t) for t in crossing])
    ends = sorted({*ends, *map(gap, loops)})
    windows: dict[Transfer, int] = {}
    first: set[Transfer] = set()
    for one in crossing:
        end, available = gap(one.done), gap(one.available)
        begin = max(ends[: bisect.bisect_left(ends, end)], default=0)
        if available < begin or one.available < 0:
            first.add(one)
        windows[one] = end - max(begin, available)
    # What the first transfers of a ring send may have been there for long: kernels
    # before them may be those of another ring's last step.
    shortest = min(windows.values(), default=0)
    windows |= dict.fromkeys(first, shortest)
    return [
        min(1.0, (gap(one.done) - gap(one.start)) / windows.get(one, 1))
        for one in transfers
    ]


def _ends_of_steps(crossing: Sequence[tuple[int, int, Transfer]]) -> list[int]:
    """Returns the numbers of kernels after which transfers end a step.

    crossing: kernels before the start and before the done of each transfer.
    """
    starts: dict[int, int] = {}
    dones: dict[int, int] = {}
    for start, done, one in crossing:
        starts[start] = min(one.start, starts.get(start, one.start))
        dones[done] = max(one.done, dones.get(done, one.done))
    return [g for g, last in dones.items() if last < starts.get(g, math.inf)]
