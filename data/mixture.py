"""Several corpora in one run, each with its share of the rows.

Which corpus the next row is of follows from its number and the weights alone, and which
of the corpus' rows from the seed: so a mixture resumes at a step number, as one corpus.
"""

import contextlib
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grain
import numpy as np

from data.batch import Batch
from data.files import describe_file
from data.rows import CorpusRows, RowOrder
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile


def parse_mixture(text: str) -> dict[str, float | None]:
    """Returns directories and their weights, of "a:0.7,b:0.3" or "a,b".

    A directory that exists is one, whatever letters its name has.

    Returns:
      By directory: its weight, or None where the text gives no weights.

    Raises:
      ValueError: a part is empty or given twice, some have weights and others have
        none, or one is not a number above 0.
    """
    if Path(text).is_dir():
        return {text: None}
    wanted = (
        'say one directory, or several, as "a,b", or with weights, as "a:0.7,b:0.3"'
    )
    weights: dict[str, float | None] = {}
    for part in map(str.strip, text.split(",")):
        name = part
        weight = None
        with contextlib.suppress(ValueError):  # it has no weight
            before, number = part.rsplit(":", 1)
            weight = float(number)
            name = before
        if not name or name in weights:
            what = "twice" if name else "an empty name"
            raise ValueError(f"{text!r} has {name or part!r} {what}: {wanted}")
        weights[name] = weight
    given = [weight for weight in weights.values() if weight is not None]
    if given and len(given) < len(weights):
        raise ValueError(f"{text!r} has weights for some only: {wanted}")
    if not all(0 < weight < math.inf for weight in given):
        raise ValueError(f"{text!r} must have weights above 0, and finite: {wanted}")
    return weights


@dataclass(frozen=True)
class MixedRows:
    """All rows of the first plan, then those of the next, and so on.

    plans: of rows of one length.
    """

    plans: Sequence[CorpusRows]

    @property
    def length(self) -> int:
        return self.plans[0].length

    @property
    def rows(self) -> int:
        return int(self.ends[-1])

    @property
    def ends(self) -> np.ndarray:
        """Rows of each plan and those before it, int64 (plans,)."""
        return np.cumsum([plan.rows for plan in self.plans])

    def read(self, row: int, index: np.ndarray) -> Batch:
        """Reads tokens of a row, as `RowPlan.read`."""
        plan, own = self._find(row)
        return plan.read(own, index)

    def work(self, row: int) -> int:
        """Counts the pairs that a row shows, as `CorpusRows.work`."""
        plan, own = self._find(row)
        return plan.work(own)

    def _find(self, row: int) -> tuple[CorpusRows, int]:
        number = int(np.searchsorted(self.ends, row, side="right"))
        plan = self.plans[number]
        return plan, row - int(self.ends[number]) + plan.rows


@dataclass(frozen=True)
class MixedOrder:
    """Takes rows from each of several plans, evenly spread, by its share.

    rows: of each plan; they are numbered as in `MixedRows`.
    weights: shares are proportional to them, within 1 %.
    order: of each plan's rows; where it has an end, so has the mixture, before any
      row is read twice.
    """

    rows: Sequence[int]
    weights: Sequence[float]
    order: RowOrder

    def sequence(self, rows: int) -> grain.MapDataset[int]:
        parts = []
        begin = 0
        for count in self.rows:
            part = self.order.sequence(count)
            parts.append(part.map(functools.partial(operator.add, begin)))
            begin += count
        return grain.MapDataset.mix(parts, [*self.weights])


def shares(weights: Mapping[str, float | None], rows: Sequence[int]) -> list[float]:
    """Returns the share of each corpus, of 1; by its rows where it has no weight."""
    parts = []
    for weight, count in zip(weights.values(), rows, strict=True):
        parts.append(float(count) if weight is None else weight)
    return [part / sum(parts) for part in parts]


def check_alike(corpora: Sequence[TokenFile]) -> None:
    """Refuses corpora whose tokens do not mean the same.

    Raises:
      ValueError: their tokenizers, or the tokens that begin or end their documents,
        differ.
    """
    first = _facts(corpora[0])
    for corpus in corpora[1:]:
        for what, fact in _facts(corpus).items():
            if fact != first[what]:
                raise ValueError(
                    f"corpora {corpora[0].directory} and {corpus.directory} differ in "
                    f"their {what} ({first[what]} and {fact}), so one model cannot "
                    "read both: prepare them with the same tokenizer"
                )


def _facts(corpus: TokenFile) -> dict[str, object]:
    tokenizer = open_tokenizer(corpus.tokenizer)
    file = tokenizer.path and describe_file(tokenizer.path)["sha256"][:12]
    return {
        "vocabulary": corpus.vocab_size,
        "tokenizer": f"{tokenizer.name} {file or ''}".strip(),
        "end of documents": tokenizer.end_of_document,
        "begin of documents": tokenizer.begin_of_document,
    }
