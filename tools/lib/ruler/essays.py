"""Essays: a text as a haystack, in sentences.

RULER puts single spaces between the words of its essays, takes as many of the words as
it needs, from the first one on and over again, and splits them with nltk's Punkt. Where
nltk or its model is missing, sentences end where a mark and a space do.
"""

import hashlib
import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

from data.json_text import read_json_object

ESSAYS = "PaulGrahamEssays.json"
"""Name of the file that RULER's downloader writes, with one field, "text"."""
SENTENCE_ENDS = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["')\]]))\s+""")

Splitter = Callable[[str], list[str]]


@dataclass(frozen=True, eq=False)
class Essays:
    """A haystack.

    words: of the text. split: into sentences. label: what it is, for reports.
    """

    words: Sequence[str]
    split: Splitter
    label: str

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads RULER's file, or any text.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is not text, or empty.
        """
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path} of text for haystacks")
        is_rulers = path.name == ESSAYS
        try:
            text = path.read_text("utf-8")
            if is_rulers:
                text = read_json_object(path)["text"]
        except (KeyError, UnicodeDecodeError) as error:
            kind = 'a JSON object with a "text"' if is_rulers else "text in UTF-8"
            raise ValueError(f"{path} must be {kind}: {error}") from error
        if not text.strip():
            raise ValueError(f"{path} has no words: give a text for haystacks")
        split, sentences = find_splitter()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        name = "RULER's essays" if is_rulers else "not RULER's essays"
        label = f"{name}: {path.name} (sha256 {digest}), sentences by {sentences}"
        return cls(re.sub(r"\s+", " ", text).split(" "), split, label)

    def sentences(self, words: int) -> tuple[str, ...]:
        """Returns the sentences of so many words; after the last comes the first."""
        return _sentences(self, words)


@lru_cache(maxsize=2)  # samples share a size
def _sentences(essays: Essays, words: int) -> tuple[str, ...]:
    times = -(-words // len(essays.words))
    text = " ".join(
        [*essays.words][:words] if times < 2 else ([*essays.words] * times)[:words]
    )
    return tuple(essays.split(text.strip()))


def find_splitter() -> tuple[Splitter, str]:
    """Returns nltk's splitter where it is installed, or else ours; and its name."""
    try:
        nltk = importlib.import_module("nltk")
        nltk.data.find("tokenizers/punkt_tab/english")
    except (ImportError, LookupError):
        return SENTENCE_ENDS.split, "marks, not by nltk"
    return nltk.sent_tokenize, "nltk"
