"""Masks of several intervals a query, each beside the keys that it must show.

Ranges are (q begin, q end, k begin, k end, kind), as MagiAttention draws them: of kind
"full", "causal", whose last query sees the last key, "inverse", whose first one sees
the first, or "both" of these.
"""

import functools
import operator
from collections.abc import Callable

import numpy as np

from kernels import masks
from kernels.masks import Mask, Visible
from kernels.trees import tree

Range = tuple[int, int, int, int, str]
KINDS = "full", "causal", "inverse", "both"


def mask_of(chains: list[list[Range]], tokens: int) -> Mask:
    """Joins chains of ranges, along each of which neither bound decreases."""
    index, found = np.arange(tokens, dtype=np.int32), []
    for chain in chains:
        k_start, k_end = np.full(tokens, tokens, np.int32), np.zeros(tokens, np.int32)
        for begin, end, first, last, kind in chain:
            rows = slice(begin, end)
            lower = index[rows] - begin if kind in ("inverse", "both") else 0
            upper = index[rows] - (end - 1) if kind in ("causal", "both") else 0
            k_start[rows], k_end[rows] = first + lower, last + upper
        k_start = np.minimum.accumulate(k_start[::-1])[::-1]
        bounds = Visible(k_start[None], np.maximum.accumulate(k_end)[None])
        found.append(Mask.of_tokens(bounds))
    return functools.reduce(operator.or_, found)


def shown_by(chains: list[list[Range]], tokens: int) -> np.ndarray:
    """Paints the ranges, query by query: bool (T, T)."""
    shown = np.zeros((tokens, tokens), bool)
    for begin, end, first, last, kind in (one for chain in chains for one in chain):
        for n, row in enumerate(range(begin, end)):
            lower = first + n * (kind in ("inverse", "both"))
            upper = last - (end - 1 - row) * (kind in ("causal", "both"))
            shown[row, lower : max(lower, upper)] = True
    return shown


def block_diffusion(tokens: int, size: int = 7) -> list[list[Range]]:
    """Noised blocks, which see themselves and earlier clean ones; clean blocks."""
    half, own, earlier, clean = tokens // 2, [], [], []
    for begin in range(0, tokens - half, size):
        end, noised = min(begin + size, tokens - half), min(begin + size, half)
        if begin < half:
            own.append((begin, noised, begin, noised, "full"))
            earlier.append((begin, noised, half, half + begin, "full"))
        clean.append((half + begin, half + end, half, half + end, "full"))
    return [own, earlier, clean]


def drawn_ranges(tokens: int) -> list[list[Range]]:
    """Draws ranges of queries, each of which sees one or two ranges of keys."""
    rng, chains = np.random.default_rng(tokens), []
    edges = np.unique([0, *rng.integers(0, tokens, 2), tokens]).tolist()
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        for _ in range(rng.integers(1, 3)):
            first, last = np.sort(rng.integers(0, tokens + 1, 2)).tolist()
            kind = KINDS[rng.integers(4)]
            chains.append([(begin, end, first, last, kind)])
    return chains


def drawn_tree(
    rng: np.random.Generator, tokens: int, segments: int = 12, levels: int = 4
) -> tuple[np.ndarray, np.ndarray]:
    """Draws ids and parents of a forest of up to four levels, depth first."""
    path: list[int] = []
    parents = []
    for segment in range(segments):
        path = path[: rng.integers(min(len(path), levels - 1) + 1)]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    ids = np.sort(rng.integers(0, segments, tokens))
    return ids.astype(np.int32), np.array(parents, np.int32)


def shown_in_tree(ids: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Follows the parents of each segment: bool (T, T)."""
    sees = np.eye(len(parents), dtype=bool)
    for segment, parent in enumerate(parents):
        if parent >= 0:
            sees[segment] |= sees[parent]
    return sees[ids[:, None], ids] & np.tri(len(ids), dtype=bool)


def answers(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A prompt of a third of the tokens, and four answers to it."""
    ids = np.maximum(0, np.arange(tokens) * 6 // tokens - 1)
    return ids, np.array([-1, 0, 0, 0, 0])


def draft(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """A trunk, and behind it a tree of tokens, two of which continue each."""
    of_trunk = max(1, tokens - 6)
    ids = np.maximum(0, np.arange(tokens) - of_trunk + 1)
    return ids, np.array([-1, 0, 0, 1, 1, 2, 2])


def _padded(ids: np.ndarray, padded: int) -> np.ndarray:
    return np.pad(ids, (0, padded - len(ids)), mode="edge")


TREES = {
    "tree": lambda length: drawn_tree(np.random.default_rng(length), length),
    "shared_prefix": answers,
    "draft": draft,
}
RANGES = {
    "block_diffusion": block_diffusion,
    "ranges": drawn_ranges,
    # Some queries see all keys, and all queries these and a window.
    "global": lambda n: [
        [(0, n // 5, 0, n, "full")],
        [(n // 5, n, 0, n // 5, "full")],
        [(n // 5, n, n // 10 + 1, n, "both")],
    ],
}
LIBRARY = {
    "first_in_window": lambda: masks.window(9) | masks.first(5) & masks.causal(),
    "prefix_in_window": lambda: masks.window(9) | masks.first(20),
    "prefix_lm": lambda: masks.causal() | masks.first(20),
}
SHOWN_BY_LIBRARY = {
    "first_in_window": lambda q, k: (k <= q) & ((q - k < 9) | (k < 5)),
    "prefix_in_window": lambda q, k: (k <= q) & (q - k < 9) | (k < 20),
    "prefix_lm": lambda q, k: (k <= q) | (k < 20),
}

UNIONS: dict[str, Callable[[int, int], Mask]] = {
    **{
        name: lambda length, padded, of=of: tree(
            _padded(of(length)[0], padded), of(length)[1]
        )
        for name, of in TREES.items()
    },
    **{
        name: lambda length, padded, of=of: mask_of(of(length), padded)
        for name, of in RANGES.items()
    },
    **{name: lambda length, padded, of=of: of() for name, of in LIBRARY.items()},
}
"""Of a number of tokens, and of these with padding, as `MASKS` of `attention`."""


def shown(name: str, tokens: int) -> np.ndarray:
    """Returns which query of a mask of UNIONS sees which key: bool (T, T)."""
    if name in TREES:
        return shown_in_tree(*TREES[name](tokens))
    if name in RANGES:
        return shown_by(RANGES[name](tokens), tokens)
    return np.broadcast_to(
        SHOWN_BY_LIBRARY[name](*np.ogrid[:tokens, :tokens]), (tokens, tokens)
    )
