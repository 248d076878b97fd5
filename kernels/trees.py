"""Masks of trees: segments that continue one another, in a row that holds each once."""

import numpy as np

from .checks import checked_ids, known, whole_number
from .masks import Mask
from .visible import Array, Visible

Run = tuple[int, int]
"""Half-open range of tokens."""


def tree(ids: Array, parents: Array, intervals: int | None = None) -> Mask:
    """Lets a token attend to its segment up to itself, and to those it continues.

    A prompt and two answers to it, `tree([0, 0, 1, 2], [-1, 0, 0])`:

        1 0 0 0
        1 1 0 0
        1 1 1 0
        1 1 0 1

    It takes the fewest intervals depth first: as many as there are branchings on the
    way to a token, and one. So do a trunk, and then its branches in the order in which
    they leave it: two.

    ids: int (T,) or (B, T), number of each token's segment, not decreasing along the
      sequence; padding has some too, as the last one's.
    parents: int (N,) or (B, N), number of the segment that each continues: less than
      its own; -1 for none.
    intervals: of a query, of which unneeded ones are empty; None for the fewest here.

    Raises:
      ValueError: the values are traced, and not known; ids decrease or are not those of
        segments; a parent does not come before its segment; more intervals are needed.
    """
    ids = _known("ids", checked_ids(ids))
    parents = np.atleast_2d(_known("parents", parents))
    _check(ids, parents)
    rows = max(len(ids), len(parents))
    ids = np.broadcast_to(ids, (rows, ids.shape[-1]))
    parents = np.broadcast_to(parents, (rows, parents.shape[-1]))
    chains = [_chains(ids[row], parents[row]) for row in range(rows)]
    # Bounds are one array: all rows have as many intervals as the one that needs most.
    most = max(1, *map(len, chains))
    if intervals is not None:
        if whole_number("tree intervals", intervals, 1) < most:
            raise ValueError(f"tree {intervals=} must be at least {most} here")
        most = intervals
    bounds = [_bounds(chains_of_row, most, ids.shape[1]) for chains_of_row in chains]
    k_start, k_end = np.stack(bounds, axis=2)  # (m, B or 1, T) each
    return Mask.of_tokens(Visible(k_start, k_end))


def _known(name: str, values: Array) -> np.ndarray:
    known_values = known(values)
    if known_values is None:
        raise ValueError(
            f"tree {name} must be known while tracing, as they decide the number of "
            "intervals: pass the bounds of the mask to the function, as Visible"
        )
    return known_values


def _check(ids: np.ndarray, parents: np.ndarray) -> None:
    shape = parents.shape
    count = shape[-1]
    is_whole = np.issubdtype(parents.dtype, np.integer)
    if not is_whole or len(shape) > 2 or len({1, len(ids), len(parents)}) > 2:
        raise ValueError(
            "tree parents must be integers (N,) or (B, N), with the rows of "
            f"{ids.shape=}, got {parents.dtype} {shape}"
        )
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= count:
        raise ValueError(
            f"tree ids must be from 0 to {count - 1}, as there are {count} parents, "
            f"got {ids.min()} to {ids.max()}"
        )
    late = np.argwhere((parents < -1) | (parents >= np.arange(count)))
    if late.size:
        row, segment = late[0]
        raise ValueError(
            "tree parents must be from -1 to their segment's number less one, got "
            f"{parents[row, segment]} for segment {segment} of row {row}"
        )


def _chains(ids: np.ndarray, parents: np.ndarray) -> list[list[tuple[Run, Run]]]:
    """Shares out what the segments of a row see over chains: (queries, keys) of each.

    Of a chain neither bound of the keys decreases. A run of keys goes on in the chain
    that ends nearest to it; the keys nearest to the queries choose first.
    """
    numbers = np.arange(len(parents))
    begins = np.searchsorted(ids, numbers, "left").tolist()
    ends = np.searchsorted(ids, numbers, "right").tolist()
    seen: list[list[Run]] = []  # by each segment, from the last run to the first
    chains: list[list[tuple[Run, Run]]] = []
    last: list[Run] = []  # bounds that a chain has come to
    for begin, end, parent in zip(begins, ends, parents.tolist(), strict=True):
        runs = seen[parent] if parent >= 0 else []
        # A child that comes right behind its parent goes on in the parent's last run.
        if runs and runs[0][1] == begin:
            runs = [(runs[0][0], end), *runs[1:]]
        elif begin < end:
            runs = [(begin, end), *runs]
        seen.append(runs)
        if begin == end:
            continue
        free = set(range(len(last)))
        for run in runs:
            # Neither bound of a chain may decrease, and its next query, the segment's
            # first, sees no key behind itself.
            until = min(run[1], begin + 1)
            fit = [n for n in free if last[n][0] <= run[0] and last[n][1] <= until]
            n = max(fit, key=lambda n: last[n][1], default=len(last))
            if n == len(last):
                last.append(run)
                chains.append([])
            last[n] = run
            chains[n].append(((begin, end), run))
            free.discard(n)
        for n in free:  # which show nothing here, so that they may not go back
            last[n] = (last[n][1], last[n][1])
    return chains


def _bounds(
    chains: list[list[tuple[Run, Run]]], intervals: int, tokens: int
) -> np.ndarray:
    """Returns k_start and k_end, int32 (2, m, T).

    Where they show nothing, they are those of the next queries and of the last ones.
    """
    k_start = np.full((intervals, tokens), tokens, np.int32)
    k_end = np.zeros_like(k_start)
    after = np.arange(1, tokens + 1)  # each query sees itself at most
    for n, chain in enumerate(chains):
        for queries, (begin, end) in chain:
            k_start[n, slice(*queries)] = begin
            k_end[n, slice(*queries)] = after[slice(*queries)].clip(max=end)
    k_start = np.minimum.accumulate(k_start[:, ::-1], axis=1)[:, ::-1]
    return np.stack([k_start, np.maximum.accumulate(k_end, axis=1)])
