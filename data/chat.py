"""Writes conversations as token files, with loss on what assistants say.

Every conversation is a document, or several where it is longer than the context and
split. Rows of whole documents (`WholeRows`) then hold several, masked
from each other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

from tqdm import tqdm

from data.chat_template import ChatTemplate, Document, join
from data.conversation import BadRow, Conversation, read_conversations
from data.holdout import Holdout
from data.token_file import SplitCounts, TokenFileWriter

TOO_LONG = ("truncate", "split")
# Encoded together: enough for every core, and little enough to hold in memory.
CONVERSATIONS_AT_A_TIME = 64


class ChatEncoder:
    """Turns conversations into documents that fit in a context.

    A longer conversation is truncated: what is beyond the context is lost, and the turn
    that it cuts is supervised as far as it goes. Or it is split between exchanges, as
    many in a document as fit, each document with the system's words; only an exchange
    that is too long by itself is truncated.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        context_tokens: int,
        too_long: str = "truncate",
    ):
        """Keeps its arguments.

        Raises:
          ValueError: a context of fewer than 2 tokens, or an unknown `too_long`.
        """
        if context_tokens < 2:
            raise ValueError(f"{context_tokens=} must be at least 2")
        if too_long not in TOO_LONG:
            raise ValueError(f"{too_long=} must be one of {', '.join(TOO_LONG)}")
        self.template = template
        self._context = context_tokens
        self._splits = too_long == "split"

    def encode(self, conversations: Sequence[Conversation]) -> list[list[Document]]:
        """Returns the documents of each conversation, without unsupervised ones."""
        exchanges = [
            pieces
            for conversation in conversations
            for pieces in self.template.exchanges(
                conversation.system, conversation.exchanges
            )
        ]
        encoded = iter(self.template.encode(exchanges))
        documents = []
        for conversation in conversations:
            its_own = [next(encoded) for _ in conversation.exchanges]
            parts = self._parts(conversation, its_own)
            cut = [Document(*(a[: self._context] for a in part)) for part in parts]
            # A document's first token is not a target.
            documents.append([part for part in cut if part.is_supervised[1:].any()])
        return documents

    def _parts(
        self, conversation: Conversation, exchanges: list[Document]
    ) -> list[Document]:
        """Joins exchanges to documents, which may still be too long."""
        if not self._splits:
            return [join(exchanges)]
        parts: list[list[Document]] = []
        room = 0
        for number, exchange in enumerate(exchanges):
            if exchange.tokens.size > room:
                if number:
                    words = [conversation.exchanges[number]]
                    pieces = self.template.exchanges(conversation.system, words)
                    exchange = self.template.encode(pieces)[0]
                parts.append([])
                room = self._context
            parts[-1].append(exchange)
            room -= exchange.tokens.size
        return [join(part) for part in parts]


@dataclass
class ChatSummary:
    """Figures of a prepared corpus.

    counts: documents and tokens of each split; supervised: tokens with a loss.
    conversations: those in the documents. skipped: rows that are not, by reason.
    """

    output: Path
    counts: dict[str, SplitCounts]
    supervised: Counter[str] = field(default_factory=Counter)
    conversations: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [
            f"{split:<10} {counts.documents:>11,} documents "
            f"{counts.tokens:>15,} tokens {self.supervised[split]:>15,} supervised"
            for split, counts in self.counts.items()
        ]
        rows = self.conversations + self.skipped.total()
        lines.append(f"{self.conversations:,} conversations of {rows:,} rows")
        lines += [
            f"skipped: {n:,} rows, {why}" for why, n in self.skipped.most_common()
        ]
        return "\n".join([*lines, f"written to {self.output}"])


def stop_at(row: BadRow) -> None:
    """Raises ValueError: for `prepare_chats`, where no row may be bad."""
    raise ValueError(f"{row}: mend or remove the row, or have bad rows skipped")


def prepare_chats(
    inputs: Sequence[Path],
    output: Path,
    encoder: ChatEncoder,
    *,
    on_bad_row: Callable[[BadRow], None] = stop_at,
    validation_fraction: float = 0.02,
) -> ChatSummary:
    """Writes the corpus `output` from files of conversations.

    Rows are read twice: all of them are checked before the first is encoded.

    Args:
      inputs: `.json` and `.jsonl` files (see data/conversation.py).
      output: a directory that does not exist yet, or is empty.
      encoder: makes the documents.
      on_bad_row: called once for every row that is not a conversation, or of which
        nothing is supervised in the context; if it returns, the row is skipped.
      validation_fraction: about this share of the conversations is held out.

    Raises:
      FileNotFoundError: an input does not exist.
      FileExistsError: `output` exists and is not empty.
      ValueError: an input is not a list of rows, there is no conversation to train
        on, or the fraction is not between 0 and 1.
    """
    holdout = Holdout(validation_fraction)
    with TokenFileWriter(
        output, encoder.template.tokenizer, has_loss_mask=True
    ) as writer:
        summary = ChatSummary(output, writer.counts)

        def skip(row: BadRow) -> None:
            on_bad_row(row)
            summary.skipped[row.reason] += 1

        for row in read_conversations(inputs):
            if isinstance(row, BadRow):
                skip(row)
            else:
                holdout.add(row.text)
        for conversation, documents in _encoded(inputs, encoder):
            if not documents:
                skip(BadRow(conversation.where, "no reply within the context"))
                continue
            summary.conversations += 1
            split = holdout.split(conversation.text)
            for document in documents:
                writer.write(split, *document)
                summary.supervised[split] += int(document.is_supervised.sum())
        if not summary.conversations:
            raise ValueError(
                "there is no conversation to train on in "
                f"{', '.join(map(str, inputs))}: {summary.skipped.total()} rows were "
                "skipped"
            )
    return summary


def _encoded(
    inputs: Sequence[Path], encoder: ChatEncoder
) -> Iterator[tuple[Conversation, list[Document]]]:
    rows = read_conversations(inputs)
    good = (row for row in rows if isinstance(row, Conversation))
    # Silent where standard error is not a terminal.
    shown = tqdm(good, desc="encoding", unit=" conversations", disable=None)
    for some in batched(shown, CONVERSATIONS_AT_A_TIME):
        yield from zip(some, encoder.encode(some), strict=True)
