"""Rows that rings get wrong elsewhere, as the trainer reads them, and their truth.

Documents of one token and of many, rows of little but padding, every mask of a run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.batch import Batch
from data.document_mask import DocumentMask
from data.rows import PackedRows, WholeRows
from data.text.tokens.token_file import TokenFile
from kernels.layouts import Contiguous, Layout, order
from tests.small.corpora import make_corpus
from tests.support.written_out import WrittenOut

TOKENS = 24
"""Of the longest document that is whole in a row; rows are as long or longer."""

MOST = 48
"""Tokens in a row, at most."""

NATURAL = Contiguous()


@dataclass(frozen=True)
class Row:
    """Whole documents of these lengths, and padding; packed: cut at the row's end."""

    documents: tuple[int, ...]
    mask: str = "causal"
    is_packed: bool = False

    @property
    def size(self) -> int:
        """Tokens of the window or the prefix; 0 without."""
        return int("".join(filter(str.isdigit, self.mask)) or 0)

    def sees(self, length: int, window: int = 0) -> np.ndarray:
        """Which tokens (query, key) see each other in a layer: bool (T, T).

        window: of the layer; 0 for none.
        """
        index, size = np.arange(length), self.size
        behind = index[:, None] - index
        shown = behind >= 0
        if self.mask.startswith("window"):
            shown &= behind < size
        if self.mask.startswith("prefix"):
            shown |= self.positions(length) < size
        if window:
            shown &= (0 <= behind) & (behind < window)
        ids = self.per_token(np.arange(len(self.documents)), length, -1)
        return shown & (ids[:, None] == ids) & (ids >= 0)

    def positions(self, length: int) -> np.ndarray:
        """Returns the tokens' places in their documents, 0 on padding: (T,)."""
        starts = np.cumsum((0, *self.documents[:-1]))
        starts = self.per_token(starts, length, -1)
        return np.where(starts < 0, 0, np.arange(length) - starts)

    def predicted(self, length: int) -> np.ndarray:
        """Which tokens have a target: the next one of their document: bool (T,)."""
        ends = np.cumsum(self.documents)
        is_last = np.arange(1, length + 1) >= self.per_token(ends, length, 0)
        places = self.positions(length) + 1
        return ~is_last & (places >= self.size * self.mask.startswith("prefix"))

    def per_token(self, values: np.ndarray, length: int, padding: int) -> np.ndarray:
        """Returns each token's value, of those of the documents: (T,)."""
        values = np.repeat(values, self.documents)[:length]
        return np.pad(values, (0, length - values.size), constant_values=padding)


ROWS = {
    "packed": Row((9, 1, MOST), is_packed=True),
    "documents": Row((9, 1, 11)),
    "window": Row((9, 1, 11), "window(4)"),
    "prefix": Row((9, 1, 11), "prefix(6)"),
    "long": Row((TOKENS,)),
    "long window": Row((TOKENS,), "window(7)"),
    # Most shards of every layout hold nothing but padding.
    "short": Row((2,)),
    "shortest": Row((1,)),
}
VOCAB = MOST * len(ROWS)
"""Every token of a batch has an id of its own, `MOST` for a row."""


class HardRows:
    """A batch of `ROWS`, of any length and in any layout."""

    def __init__(self, directory: Path):
        """directory: empty."""
        self.corpora: dict[str, TokenFile] = {}
        for number, (name, row) in enumerate(ROWS.items()):
            (directory / str(number)).mkdir()
            self.corpora[name] = make_corpus(directory / str(number), row.documents)

    def read(self, length: int, layout: Layout = NATURAL, ring_size: int = 1) -> Batch:
        """Reads rows of `length` in the order of a layout, with unlike loss weights."""
        index, found = order(layout, ring_size, length), []
        for number, (name, row) in enumerate(ROWS.items()):
            plan = PackedRows if row.is_packed else WholeRows
            mask = DocumentMask.parse(row.mask)
            batch = plan(self.corpora[name], length, mask).read(0, index)
            # The trainer's padding is 0; here each of its tokens has an id too.
            tokens = np.where(batch.k_start < batch.k_end, batch.tokens, index)
            ids = {"tokens": tokens + number * MOST}
            ids |= {"targets": batch.targets + number * MOST}
            unlike = 1 + (7 * index + number) % 5 + 9 * (index < 7) * (index % 4 < 2)
            weights = {"loss_weights": np.float32(batch.loss_weights * unlike)}
            found.append(batch._replace(**ids | weights))
        return Batch(*map(np.stack, zip(*found, strict=True)))


def changed(batch: Batch, slots: int | np.ndarray) -> Batch:
    """Returns each row with another token in one slot; slots: (rows,)."""
    tokens, rows = batch.tokens.copy(), np.arange(len(batch.tokens))
    tokens[rows, slots] = (tokens[rows, slots] + MOST) % VOCAB
    return batch._replace(tokens=tokens)


def reach(row: Row, length: int, windows: list[int]) -> np.ndarray:
    """Which tokens (moved, changed) a change moves through layers: bool (T, T)."""
    moved = np.eye(length, dtype=bool)
    for window in windows:
        moved |= row.sees(length, window) @ moved
    return moved


def token_losses(sizes: Any, parameters: Any, batch: Batch) -> np.ndarray:
    """Returns the loss of every token in float64, (B, T); batch in natural order."""
    model = WrittenOut(sizes, parameters)
    logits = sizes.logit_scale * (model(batch)[0] @ model.parameters["head"])
    chosen = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(axis=-1)) - chosen
