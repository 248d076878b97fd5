"""Shows documents as a model sees them, with what is learned between ⟦ and ⟧."""

import numpy as np

from data.text.reading.skipped import printable
from data.text.tokens.prefix_tree import Document
from data.text.tokens.tokenizer import Tokenizer

MOST_SHOWN = 1000
"""Letters of a learned part, or of one between two, that are shown."""


def show(document: Document, tokenizer: Tokenizer) -> str:
    """Returns a document's text, with the names of special tokens."""
    is_learned = document.loss_weights > 0
    borders = np.flatnonzero(np.diff(is_learned)) + 1
    shown = []
    for part in np.split(np.arange(is_learned.size), borders):
        text = _spell(document.tokens[part], tokenizer)
        left_out = len(text) - MOST_SHOWN
        if left_out > 0:
            half = MOST_SHOWN // 2
            text = f"{text[:half]} [… {left_out:,} letters …] {text[-half:]}"
        shown.append(f"⟦{text}⟧" if is_learned[part[0]] else text)
    return "\n".join(map(printable, "".join(shown).split("\n")))


def _spell(tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Returns the text of tokens (n,), with the names of special ones."""
    names = {token: name for name, token in tokenizer.special.items()}
    is_special = np.isin(tokens, [*names])
    borders = np.flatnonzero(is_special[1:] | is_special[:-1]) + 1
    pieces = []
    for part in np.split(tokens, borders):
        name = names.get(int(part[0])) if part.size else ""
        pieces.append(tokenizer.decode(part) if name is None else name)
    return "".join(pieces)
