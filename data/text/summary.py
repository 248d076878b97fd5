"""What is said of a corpus that was prepared."""

from collections import Counter
from dataclasses import dataclass, field

from data.text.input_files import Inputs
from data.text.skipped import BadRow, Skipped, printable
from data.text.token_file import SplitCounts, TokenFileWriter


@dataclass
class Summary:
    """Figures of a prepared corpus, and what did not come into it.

    writer: of the corpus.
    supervised: tokens with a loss, by split; empty where all have.
    rows: how many rows there were, and of what, in words; "": documents are rows.
    inputs: whose files were read, or left out; None: it is made of none.
    skipped: rows and files without a document.
    cut: rows that are too long, of which a part is lost.
    lost: tokens of these parts.
    markup: documents with markup that is learned as text.
    unwritten: conversations of which the chat template leaves out a part.
    """

    writer: TokenFileWriter
    inputs: Inputs | None = None
    supervised: Counter[str] = field(default_factory=Counter)
    rows: str = ""
    skipped: Skipped = field(default_factory=Skipped)
    cut: Skipped = field(default_factory=Skipped)
    lost: int = 0
    markup: Skipped = field(default_factory=Skipped)
    unwritten: Skipped = field(default_factory=Skipped)

    def add_cut(self, row: BadRow, tokens: int) -> None:
        """Counts a row of which so many tokens are lost."""
        self.cut.add(row)
        self.lost += tokens

    @property
    def counts(self) -> dict[str, SplitCounts]:
        """Documents and tokens of each split."""
        return self.writer.counts

    def __str__(self) -> str:
        lines = []
        for split, counts in self.counts.items():
            size = counts.tokens * self.writer.bytes_per_token / 1e6
            line = (
                f"{split:<10} {counts.documents:>11,} documents "
                f"{counts.tokens:>15,} tokens {size:>10,.1f} MB"
            )
            supervised = f" {self.supervised[split]:>15,} supervised"
            lines.append(line + supervised * bool(self.supervised))
        lines += [self.rows] * bool(self.rows)
        lines += [str(self.writer.sources)] * bool(self.writer.sources)
        tokenizer = self.writer.tokenizer
        begins = ", ".join(map(str, tokenizer.begin_of_document))
        begin = f"begin with {begins} and " if begins else ""
        source = f" {tokenizer.path}" if tokenizer.path else ""
        lines.append(
            f"tokenizer: {tokenizer.name}{source}, {tokenizer.vocab_size:,} ids; "
            f"documents {begin}end with {tokenizer.end_of_document}"
        )
        lines += self.inputs.lines() if self.inputs else []
        lines += self.skipped.lines("skipped")
        lines += self.cut.lines(f"cut, {self.lost:,} tokens lost")
        lines += self.markup.lines("markup, learned as text")
        lines += self.unwritten.lines("WARNING: not in the chat template")
        lines.append(f"written to {self.writer.directory}")
        return "\n".join(map(printable, lines))
