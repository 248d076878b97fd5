"""Texts that begin alike as one document, a tree, in which each token is there once.

Where texts part, the last token that they share has several successors, and a loss at
each: it is the first token of every branch, and not in the trunk. So a token has one
target, the next one in the stream, and the tree has the losses of all its texts:

    a b c d e        a b | c d e | c f
    a b c f

Texts that share less than LEAST_SHARED tokens are documents of their own, and branches
that share less of their own leave the trunk by themselves: a token would see one more
interval of keys for little. A trunk is written before its branches, and these in the
order in which they leave it; it goes on where most intervals are needed (see
`kernels.trees.tree`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

LEAST_SHARED = 256
"""Tokens that branches share, at least: a sub-tile of the kernels."""


class Document(NamedTuple):
    """A text's tokens, or a tree's.

    tokens: int32 (n,).
    weights: bool or float32 (n,), of the loss of each; None: all have a loss.
    segments: int64 (s, 2), where each begins, from 0, and how many before it is the one
      that it continues, 0 for none; None: one.
    intervals: of the keys that a token sees.
    """

    tokens: np.ndarray
    weights: np.ndarray | None
    segments: np.ndarray | None = None
    intervals: int = 1


@dataclass
class _Node:
    """Tokens [begin, end) of some texts, which agree in them.

    among: texts that agree in the token before the first of them.
    """

    texts: list[int]
    among: list[int]
    begin: int
    end: int
    parent: "_Node | None"
    branches: list["_Node"] = field(default_factory=list)
    intervals: int = 1

    @property
    def is_short(self) -> bool:
        """Whether its branches share too little."""
        return len(self.branches) > 0 and self.end - self.begin < LEAST_SHARED

    def dissolved(self) -> list["_Node"]:
        """Returns the branches with the node's tokens in each."""
        going_on = {number for branch in self.branches for number in branch.texts}
        self.branches[0].texts += [n for n in self.texts if n not in going_on]
        for branch in self.branches:
            branch.begin, branch.parent = self.begin, self.parent
        return self.branches

    @property
    def trunk(self) -> "_Node | None":
        """The branch that the trunk goes on with: where most intervals are needed."""
        return max(self.branches, key=lambda node: node.intervals, default=None)


def join(texts: Sequence[Document]) -> list[Document]:
    """Writes texts as trees; a token's weight is the sum over the texts with it.

    texts: without segments, with weights.
    """
    if len(texts) == 1:
        return [*texts]
    return [_document(texts, root) for root in _split([text.tokens for text in texts])]


def _document(texts: Sequence[Document], root: _Node) -> Document:
    """Writes the nodes of a tree."""
    ordered = [*_in_order(root)]
    numbers = {id(node): number for number, node in enumerate(ordered)}
    parts, segments, size = [], [], 0
    for number, node in enumerate(ordered):
        back = number - numbers[id(node.parent)] if node.parent else 0
        weights = _summed(texts, node.texts, node.begin, node.end)
        # The trunk's last token predicts the first of the branch behind it.
        before = _summed(texts, node.among, node.begin, node.begin + 1)
        weights[:1] = before * (back == 1)
        parts.append((texts[node.texts[0]].tokens[node.begin : node.end], weights))
        segments.append((size, back))
        size += node.end - node.begin
    tokens, weights = map(np.concatenate, zip(*parts, strict=True))
    found = Document(tokens, as_mask(weights))
    if root.intervals == 1:  # a chain
        return found
    return found._replace(segments=np.array(segments), intervals=root.intervals)


def as_mask(weights: np.ndarray) -> np.ndarray:
    """Returns weights as a loss mask, bool (n,), where they are 0 and 1."""
    return weights.astype(bool) if np.isin(weights, (0, 1)).all() else weights


def are_parts(segments: np.ndarray, offsets: np.ndarray) -> bool:
    """Returns whether documents are made of segments that continue their own.

    segments: int64 (s, 2), of `Document`, where each begins in a stream of documents.
    offsets: int64 (documents + 1,), where these begin, and the last one ends.
    """
    begins, back = segments.T
    if not begins.size or (np.diff(begins, append=offsets[-1]) <= 0).any():
        return False
    place = np.searchsorted(begins, offsets[:-1])
    first = place[np.searchsorted(offsets, begins, side="right") - 1]
    is_inside = (back >= 0) & (back <= np.arange(back.size) - first)
    return np.array_equal(begins[place], offsets[:-1]) and bool(is_inside.all())


def join_within(texts: Sequence[Document], size: int) -> list[Document]:
    """Writes texts as trees of up to `size` tokens, as many texts in each as fit.

    texts: each of up to `size` tokens.
    """
    trees: list[Document] = []

    def tokens(count: int) -> int:
        return max(tree.tokens.size for tree in join(texts[:count]))

    while texts:
        fitting = bisect_right(range(1, len(texts) + 1), size, key=tokens)
        trees += join(texts[:fitting])
        texts = texts[fitting:]
    return trees


def _split(texts: Sequence[np.ndarray]) -> list[_Node]:
    """Splits texts where they part; returns the nodes that continue none."""
    every = [*range(len(texts))]
    nodes: list[_Node] = []
    todo: list[tuple[list[int], list[int], int, _Node | None]]
    todo = [(every, every, 0, None)]
    while todo:
        some, among, begin, parent = todo.pop()
        end = _shared([texts[number] for number in some], begin)
        groups: dict[int, list[int]] = {}
        for number in some:
            if texts[number].size > end:
                groups.setdefault(int(texts[number][end]), []).append(number)
        if len(groups) > 1:
            end = max(end - 1, begin)
        if end > begin:
            parent = _Node(some, among, begin, end, parent)
            nodes.append(parent)
            among = some
        todo += [(group, among, end, parent) for group in reversed(groups.values())]
    roots: list[_Node] = []
    for node in reversed(nodes):
        while short := [b for b in node.branches if b.is_short and b is not node.trunk]:
            node.branches.remove(short[0])
            node.branches += short[0].dissolved()
        needs = sorted(branch.intervals for branch in node.branches)
        node.intervals = max([1, *needs[-1:], *(need + 1 for need in needs[:-1])])
        (roots if node.parent is None else node.parent.branches).insert(0, node)
    while short := [root for root in roots if root.is_short]:
        roots.remove(short[0])
        roots += short[0].dissolved()
    return roots


def _shared(texts: Sequence[np.ndarray], begin: int) -> int:
    """Returns where texts that agree up to `begin` part, or the shortest ends."""
    end = min(text.size for text in texts)
    for text in texts[1:]:
        differs = text[begin:end] != texts[0][begin:end]
        end = begin + int(differs.argmax()) if differs.any() else end
    return end


def _in_order(root: _Node) -> Iterator[_Node]:
    """Yields trunks before their branches."""
    todo = [root]
    while todo:
        node: _Node | None = todo.pop()
        leaving = []
        while node is not None:
            yield node
            trunk = node.trunk
            leaving += [branch for branch in node.branches if branch is not trunk]
            node = trunk
        todo += reversed(leaving)


def _summed(
    texts: Sequence[Document], some: Sequence[int], begin: int, end: int
) -> np.ndarray:
    """Sums the texts' weights of tokens [begin, end), float32; some end before."""
    total = np.zeros(end - begin, np.float32)
    for number in some:
        found = texts[number].weights[begin:end]
        total[: found.size] += found
    return total
