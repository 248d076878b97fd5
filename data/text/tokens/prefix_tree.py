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

    @property
    def loss_weights(self) -> np.ndarray:
        """Weights of its tokens' losses, 1 for each where it says none."""
        return np.ones(self.tokens.size, bool) if self.weights is None else self.weights


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
        going_on: set[int] = set()
        for branch in self.branches:
            branch.begin = self.begin
            branch.parent = self.parent
            going_on.update(branch.texts)
        # Texts that end in the node are of its first branch from here on.
        self.branches[0].texts += [n for n in self.texts if n not in going_on]
        return self.branches

    @property
    def trunk(self) -> "_Node | None":
        """The branch that the trunk goes on with: where most intervals are needed."""
        return max(self.branches, key=lambda node: node.intervals, default=None)


def join(texts: Sequence[Document]) -> list[Document]:
    """Writes texts as trees; a token's weight is the sum over the texts with it.

    texts: without segments.
    """
    if len(texts) == 1:
        return [*texts]
    return [_document(texts, root) for root in _split([text.tokens for text in texts])]


def _document(texts: Sequence[Document], root: _Node) -> Document:
    """Writes the nodes of a tree."""
    ordered = [*_in_order(root)]
    numbers = {id(node): number for number, node in enumerate(ordered)}
    tokens = []
    weights = []
    segments = []
    size = 0
    for number, node in enumerate(ordered):
        back = number - numbers[id(node.parent)] if node.parent else 0
        own = _summed(texts, node.texts, node.begin, node.end)
        # The trunk's last token predicts the first of the branch behind it.
        before = _summed(texts, node.among, node.begin, node.begin + 1)
        own[:1] = before * (back == 1)
        tokens.append(texts[node.texts[0]].tokens[node.begin : node.end])
        weights.append(own)
        segments.append((size, back))
        size += node.end - node.begin
    document = Document(np.concatenate(tokens), as_mask(np.concatenate(weights)))
    if root.intervals == 1:  # a chain
        return document
    return document._replace(segments=np.array(segments), intervals=root.intervals)


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
    first = np.searchsorted(begins, offsets[:-1])  # segment of each document
    own_first = first[np.searchsorted(offsets, begins, side="right") - 1]
    is_inside = (back >= 0) & (back <= np.arange(back.size) - own_first)
    return np.array_equal(begins[first], offsets[:-1]) and bool(is_inside.all())


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
        _dissolve_short(node.branches, node)
        needs = sorted(branch.intervals for branch in node.branches)
        # The trunk lies right behind the node, in one interval with it; other branches
        # need one more.
        node.intervals = max([1, *needs[-1:]])
        if len(needs) > 1:
            node.intervals = max(node.intervals, needs[-2] + 1)
        siblings = roots if node.parent is None else node.parent.branches
        siblings.insert(0, node)
    _dissolve_short(roots, None)
    return roots


def _dissolve_short(branches: list[_Node], node: _Node | None) -> None:
    """Replaces short branches of a node, but its trunk, by their own branches.

    node: None for roots, of which none is a trunk.
    """
    while True:
        trunk = node.trunk if node else None
        short = [b for b in branches if b.is_short and b is not trunk]
        if not short:
            return
        branches.remove(short[0])
        branches += short[0].dissolved()


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
        part = texts[number].loss_weights[begin:end]
        total[: part.size] += part
    return total
