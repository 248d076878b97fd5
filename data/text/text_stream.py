"""Decodes tokens to text as they come."""

from collections.abc import Sequence

import numpy as np

from data.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_CONTEXT = 8
"""Number of tokens before the new ones that decide on the space between them."""


class TextStream:
    """Decodes tokens one by one into text that never has to be taken back.

    A letter may be made of several tokens: it is held back until the last of them.
    What comes out in all is what the tokenizer decodes at once.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        """Begins with a prompt: the tokens before the first new one, int (n,)."""
        self._tokenizer = tokenizer
        self._ids = [int(token) for token in prompt[-_CONTEXT:]]
        self._known = len(self._ids)  # tokens whose text is out
        self._shown = len(self._decode(self._ids))  # letters of `_ids` that are out

    def push(self, token: int) -> str:
        """Returns the text that this token completes: a word, or nothing yet."""
        self._ids.append(int(token))
        text = self._decode(self._ids)
        finished = text.rstrip(_UNFINISHED)
        new = finished[self._shown :]
        self._shown = max(self._shown, len(finished))
        if finished == text:
            # The tokens that were new last are the context of the next ones.
            self._ids = self._ids[self._known :] or self._ids
            self._known = len(self._ids)
            self._shown = len(self._decode(self._ids))
        return new

    def finish(self) -> str:
        """Returns what was held back for a letter that is not completed."""
        return self._decode(self._ids)[self._shown :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(np.array(ids, np.int32))
