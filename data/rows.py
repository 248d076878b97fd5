"""Batches of text: token files cut into rows, rows into batches, batches into blocks.

A *plan* says which tokens each row holds: `PackedRows`, `WholeRows` or `DocumentRows`,
and its mask which of them see each other. An *order* says which row is read when:
`Shuffled` or `InOrder`, or by work (`data/balance.py`). `TextBatches` joins them and
gives the batch of any step, as the blocks that this host's devices hold: a function of
the step's number and the seed alone, never of hosts, mesh, ring or layout.
"""

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Protocol

import grain
import numpy as np

from data.batch import Batch, Block
from data.column_order import ColumnOrder
from data.document_mask import DocumentMask
from data.row_trees import RowTrees
from data.text.tokens.token_file import TokenFile
from kernels.layouts import Layout, padded_length


class RowPlan(Protocol):
    """Interface of a plan, which cuts a corpus into rows of `length` tokens or less."""

    @property
    def length(self) -> int: ...

    @property
    def rows(self) -> int: ...

    def read(self, row: int, index: np.ndarray) -> Batch:
        """Reads the row's tokens of numbers `index`, int32 (L,): arrays (L,).

        Numbers from `length` on are padding, as the layout of a ring may need it.
        Or another NamedTuple, of arrays (L, …), as `data.agents.chains.Chains` gives.
        """


@dataclass(frozen=True)
class CorpusRows(ABC):
    """Rows that are parts of a corpus' stream, one after the other.

    corpus: whose tokens they hold. length: tokens in a row, or fewer and padding.
    mask: which tokens of its own document a token sees.
    intervals: of keys that a token sees, of which some may be empty; more than 1 with
      trees, in whole documents.

    Raises:
      ValueError: the corpus has no row of this length.
    """

    corpus: TokenFile
    length: int
    mask: DocumentMask = DocumentMask()
    intervals: int = 1

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"a row's length={self.length} must be at least 1 token")
        if self.rows < 1:
            raise ValueError(
                f"split {self.corpus.split!r} of {self.corpus.directory}, of "
                f"{self.corpus.tokens.size} tokens, has no row of {self.length} tokens "
                "and what follows them: shorten the context or prepare more text"
            )

    @property
    @abstractmethod
    def rows(self) -> int:
        """Number of rows."""

    @abstractmethod
    def span(self, row: int) -> tuple[int, int]:
        """Returns where in the stream what the row reads and predicts begins and ends.

        That is up to `length` tokens and the target of the last one; fewer in a padded
        row. It holds whole documents, or parts of those at its ends.
        """

    def read(self, row: int, index: np.ndarray) -> Batch:
        """Reads tokens of a row, as `RowPlan.read`."""
        begin, trees = self._trees(row)
        size = int(trees.bounds[-1])
        part = np.searchsorted(trees.bounds[:-1], index, side="right") - 1
        first = trees.bounds[part].astype(np.int32)
        end = trees.bounds[part + 1].astype(np.int32)
        is_real = index < min(size, self.length)
        positions = np.where(is_real, index - first + trees.depths[part], 0)
        if self.intervals > 1:
            k_start, k_end = trees.visible(index, self.intervals)
        else:
            k_start, k_end = self.mask.bounds(index, first, end.clip(max=self.length))
        pairs = np.stack([index, index + 1], axis=1)
        offsets = begin + np.minimum(pairs, size - 1, dtype=np.int64)  # (L, 2)
        # The token behind a document's last one is of another document.
        has_target = (index + 1 < end) | (trees.goes_on[part] & is_real)
        # A token of the prefix would see its target there.
        has_target &= positions + 1 >= self.mask.prefix
        weights = self.corpus.weights(offsets[:, 1])
        tokens, targets = self.corpus.ids(offsets).T
        # As no k_end is behind the last real token, these make padding see nothing.
        shape = (-1, *[1] * (k_start.ndim - 1))
        k_start = np.where(is_real.reshape(shape), k_start, index.reshape(shape))
        return Batch(
            tokens=np.where(is_real, tokens, 0),
            targets=np.where(index + 1 < size, targets, 0),
            loss_weights=np.where(has_target, weights, np.float32(0)),
            positions=positions.astype(np.int32),
            k_start=k_start,
            k_end=k_end,
        )

    def work(self, row: int) -> int:
        """Counts the pairs of a query and a key that the row's mask shows."""
        _, trees = self._trees(row)
        if self.intervals > 1:
            return trees.pairs
        bounds = np.minimum(trees.bounds, self.length)
        return int(self.mask.pairs(np.diff(bounds)).sum())

    def _trees(self, row: int) -> tuple[int, RowTrees]:
        """Returns where the row begins, and its trees, the last target included."""
        begin, stop = self.span(row)
        if self.corpus.segments is not None:
            return begin, RowTrees.of(self.corpus.segments, begin, stop)
        inner = self.corpus.documents.between(begin, stop)
        bounds = np.r_[begin, inner, stop] - begin
        return begin, RowTrees(bounds, np.full(bounds.size - 1, -1))


class PackedRows(CorpusRows):
    """Row r is the stream's tokens r·T … r·T + T - 1, whatever documents they are of.

    A token attends only to its own document, and of that only to what is in the row:
    the rest of a document that the row's edge cuts starts at position 0, and is one for
    the mask. Every token of the stream is in exactly one row, except up to T at its
    end.
    """

    @property
    def rows(self) -> int:
        # The last token is nothing but the target of the one before it.
        return (self.corpus.tokens.size - 1) // self.length

    def span(self, row: int) -> tuple[int, int]:
        begin = row * self.length
        return begin, begin + self.length + 1


class CountedRows(CorpusRows):
    """Rows that are counted once, by blocks of documents: memory holds few of these."""

    @abstractmethod
    def _counts(self, offsets: np.ndarray, first: int) -> np.ndarray:
        """Returns how many rows begin in each document of a block, int64 (documents,).

        offsets: where these start, and the last one ends.
        first: stream offset of the first row that starts in this block.
        """

    @abstractmethod
    def _end(self, begin: int) -> int:
        """Returns where the row ends that begins here (see `span`)."""

    @property
    def rows(self) -> int:
        return int(self._blocks[0, -1])

    @cached_property
    def _blocks(self) -> np.ndarray:
        """Rows before each block, and the offset of its first: int64 (2, blocks + 1).

        The last column is of the end: all rows, and where another would begin.
        """
        before = [0]
        firsts = [0]
        for number in range(self.corpus.documents.blocks):
            offsets = self.corpus.documents.block(number)
            first = firsts[-1]
            counts = self._counts(offsets, first)
            if counts.any():
                first = self._end(int(offsets[np.flatnonzero(counts)[-1]]))
            before.append(before[-1] + int(counts.sum()))
            firsts.append(first)
        return np.array([before, firsts])

    def span(self, row: int) -> tuple[int, int]:
        before, firsts = self._blocks
        block = int(before.searchsorted(row, side="right")) - 1
        offsets = self.corpus.documents.block(block)
        counts = self._counts(offsets, int(firsts[block]))
        until = before[block] + np.cumsum(counts)
        document = int(until.searchsorted(row, side="right"))
        part = row - int(until[document] - counts[document])
        begin = int(offsets[document]) + part * self.length
        return begin, self._end(begin)


class WholeRows(CountedRows):
    """A row holds as many whole documents as fit, in their order, and padding.

    For documents that mean little in parts, as conversations.
    """

    def _counts(self, offsets: np.ndarray, first: int) -> np.ndarray:
        lengths = np.diff(offsets)
        if lengths.max() > self.length:
            document = int(np.argmax(lengths))
            number = self.corpus.documents.search(int(offsets[document])) - 1
            raise ValueError(
                f"document {number} of split {self.corpus.split!r} of "
                f"{self.corpus.directory} has {lengths[document]} tokens, which do not "
                f"fit whole in a row of {self.length}: take a longer context, prepare "
                "the corpus for this one, or use packed rows"
            )
        counts = np.zeros_like(lengths)
        # Of each document, the first that does not fit in a row beginning with it.
        after = offsets.searchsorted(offsets + self.length, side="right") - 1
        nexts = after.tolist()
        document = int(offsets.searchsorted(first))
        while document < lengths.size:
            counts[document] = 1
            document = nexts[document]
        return counts

    def _end(self, begin: int) -> int:
        documents = self.corpus.documents
        end = begin + self.length
        # A document that ends there is the last one that fits.
        return documents.offset(documents.search(end) - (end < documents.end))


class DocumentRows(CountedRows):
    """A row holds one document, padded to T, or T tokens of a longer document.

    The parts of a long document each start at position 0 of their row; only its last
    row is padded. Rows are made for every token that has a successor in its document,
    so nothing is lost, and no row is without a target.
    """

    def _counts(self, offsets: np.ndarray, first: int) -> np.ndarray:
        return -(-(np.diff(offsets) - 1) // self.length)

    def _end(self, begin: int) -> int:
        documents = self.corpus.documents
        return min(begin + self.length + 1, documents.offset(documents.search(begin)))


ROW_PLANS = {"packed": PackedRows, "documents": DocumentRows, "whole": WholeRows}
"""Plans by the names that configs give them."""


class RowOrder(Protocol):
    """Interface of an order of rows."""

    def sequence(self, rows: int) -> grain.MapDataset[int]:
        """Returns numbers below `rows`, in the order in which rows are read."""


@dataclass(frozen=True)
class Shuffled:
    """Every epoch reads every row once, each epoch in an order of its own, for ever.

    seed: 0 to 2^32 - 1.
    """

    seed: int

    def sequence(self, rows: int) -> grain.MapDataset[int]:
        # repeat() without a number has a length that batch(1) cannot round up.
        epochs = sys.maxsize // 2 // rows
        return grain.MapDataset.range(rows).shuffle(self.seed).repeat(epochs)


@dataclass(frozen=True)
class InOrder:
    """Every row once, as they come: for validation, where runs are compared."""

    def sequence(self, rows: int) -> grain.MapDataset[int]:
        return grain.MapDataset.range(rows)


class TextBatches:
    """Batches by step: `batches[step]` is a dict from block to `Batch`.

    `len(batches)` counts the whole batches that the order has: practically without end
    for `Shuffled`; for `InOrder` the rows left over at the end are not read.

    columns: slots of a row: its tokens, and padding up to what the ring can shard.
    rows: that the plan has, those left over included. ordered: that the order has.
    """

    def __init__(
        self,
        plan: RowPlan,
        blocks: Sequence[Block],
        batch_rows: int,
        layout: Layout,
        ring_size: int,
        row_order: RowOrder,
        columns: int | None = None,
        fills: bool = False,
    ):
        """Cuts the rows of `plan` into batches, and these into blocks.

        Args:
          blocks: what this host's devices hold; the same block is loaded once.
          batch_rows: rows in the *global* batch.
          layout, ring_size: which token of the row is in which slot.
          columns: slots of a row; None: as few as the ring can shard.
          fills: whether the rows left over are a batch too, filled up with others.

        Raises:
          ValueError: there are too few rows for one batch.
        """
        self.blocks = tuple(dict.fromkeys(blocks))
        self._plan = plan
        self.rows = plan.rows
        self.columns = columns or padded_length(layout, ring_size, plan.length)
        # By rows of the batch, so that what several devices hold of a row is read once.
        held: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for block in self.blocks:
            held.setdefault(block.rows, []).append(block.columns)

        # Cached: most rows of a batch are held with the same columns.
        ordered = cache(partial(ColumnOrder, layout, ring_size, self.columns))
        self._held = {rows: ordered((*columns,)) for rows, columns in held.items()}
        sequence = row_order.sequence(plan.rows)
        self.ordered = len(sequence)
        if fills:
            whole = -(-self.ordered // batch_rows) * batch_rows
            sequence = sequence.repeat(1 + batch_rows)[:whole]
        if not 1 <= batch_rows <= len(sequence):
            rows = min(plan.rows, len(sequence))
            raise ValueError(
                f"{batch_rows=}: a batch cannot be made of {rows} rows of "
                f"{plan.length} tokens: take fewer rows in a batch (at least 1), a "
                "shorter context or a larger split"
            )
        self._steps = sequence.batch(batch_rows, drop_remainder=True)

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, step: int) -> dict[Block, Batch]:
        """Reads the blocks of the batch of `step`, each (rows, columns).

        Raises:
          IndexError: the step is negative, or past the last whole batch.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"{step=} must be one of the {len(self)} batches")
        # A step's rows follow from its number alone. Did they depend on the host or on
        # what was read before, hosts would join blocks of unlike batches, and a run
        # that resumes would read other rows: in silence, as all shapes fit.
        numbers = np.asarray(self._steps[step])
        blocks = {}
        for (begin, end), columns in self._held.items():
            read = [self._plan.read(int(n), columns.index) for n in numbers[begin:end]]
            whole = [*map(np.stack, zip(*read, strict=True))]  # (rows, L, …) each
            for part, inverse in columns.inverse.items():
                arrays = [array[:, inverse] for array in whole]
                blocks[Block((begin, end), part)] = type(read[0])._make(arrays)
        return blocks


def iterate(
    batches: TextBatches, first_step: int = 0, *, threads: int = 4
) -> Generator[tuple[int, dict[Block, Batch]], None, None]:
    """Yields (step, blocks) from `first_step` to the last, reading ahead.

    A run that resumes at a step reads what it would have read undisturbed. The threads
    end with the iterator: when it is exhausted, closed (`contextlib.closing`) or
    dropped. An error in a thread is raised at the step that it belongs to.

    Args:
      threads: how many steps are read at the same time; 0 reads without threads.

    Raises:
      ValueError: `first_step` is missing.
    """
    if not 0 <= first_step < len(batches):
        raise ValueError(f"{first_step=} must be one of the {len(batches)} batches")
    steps = grain.MapDataset.range(first_step, len(batches))
    options = grain.ReadOptions(threads, prefetch_buffer_size=max(threads, 4))
    read = steps.map(lambda step: (step, batches[step]))
    return _closing(read.to_iter_dataset(options))


def _closing(dataset: grain.IterDataset) -> Generator:
    with contextlib.closing(iter(dataset)) as iterator:
        yield from iterator
