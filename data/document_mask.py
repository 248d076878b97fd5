"""Which tokens of its own document a token sees: the mask of a run."""

import re
from dataclasses import dataclass

import numpy as np

from kernels import masks
from kernels.masks import Array, Mask

_FORMS = re.compile(r"causal|(?P<name>window|prefix)\((?P<tokens>\d+)\)")


@dataclass(frozen=True)
class DocumentMask:
    """A causal mask within documents; at most one field says how it differs.

    window: tokens that a token sees, its own included; 0 for all before it.
    prefix: first tokens of every document, which see each other; 0 for none.
    """

    window: int = 0
    prefix: int = 0

    @classmethod
    def parse(cls, mask: str) -> "DocumentMask":
        """Reads "causal", "window(4096)" or "prefix(1024)".

        Raises:
          ValueError: the form is unknown.
        """
        form = _FORMS.fullmatch(mask)
        if form and not form["name"]:
            return cls()
        if not form or not 0 < int(form["tokens"]) < 1 << 31:
            raise ValueError(
                f'{mask=} must be "causal", "window(N)" or "prefix(N)" with N tokens '
                'from 1 to 2^31 - 1, as in "window(4096)"; they are not joined: a '
                "window shows nothing ahead, so it would leave no prefix"
            )
        return cls(**{form["name"]: int(form["tokens"])})

    def bounds(
        self, index: np.ndarray, first: np.ndarray, end: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns k_start and k_end of the tokens at `index`, int32 (L,).

        first: index of the document's first token, int32 (L,). end: one after its last.
        """
        k_start = np.maximum(first, index + 1 - self.window) if self.window else first
        prefix = first + np.minimum(self.prefix, end - first)
        return k_start, np.minimum(np.maximum(index + 1, prefix), end)

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Counts what the tokens of documents see in all, int64 (documents,).

        lengths: tokens of each, int64 (documents,).
        """
        beyond = np.maximum(lengths - self.window, 0) if self.window else 0
        ahead = np.minimum(self.prefix, lengths)
        triangles = lengths * (lengths + 1) - beyond * (beyond + 1)
        return (triangles + ahead * (ahead - 1)) // 2

    def within(self) -> Mask:
        """Returns a mask of indices alone that shows all that this one does.

        Whatever the documents are; keys outside of it need not travel in a ring.
        """
        if self.prefix:  # of any document, so tokens ahead
            return masks.full()
        return masks.window(self.window) if self.window else masks.causal()

    def of_prompts(self, lengths: Array) -> Mask:
        """Returns the mask of rows that each begin a document, their prompt first.

        lengths: of the prompts, int32 (B, 1): no prefix is longer.
        """
        if self.prefix:
            return masks.prefix(lengths.clip(max=self.prefix))
        return masks.window(self.window) if self.window else masks.causal()
