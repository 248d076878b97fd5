"""Writes conversations as token files, with loss on what assistants say.

Every conversation is a document, or several where it is longer than the context and
split. Rows of whole documents (`WholeRows`) then hold several, masked
from each other.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import batched
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.chat_template import ChatTemplate, Document, join
from data.conversation import Conversation, read_conversations
from data.holdout import Holdout
from data.input_files import Inputs, list_inputs
from data.skipped import BadRow, stop_at
from data.summary import Summary
from data.token_file import TokenFileWriter

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


def prepare_chats(
    inputs: Sequence[Path],
    output: Path,
    encoder: ChatEncoder,
    *,
    on_bad_row: Callable[[BadRow], None] = stop_at,
    validation_fraction: float = 0.02,
    **chosen: Any,
) -> Summary:
    """Writes the corpus `output` from files of conversations.

    Rows are read twice: all of them are checked before the first is encoded.

    Args:
      inputs: files of rows (see data/conversation.py), and directories of them.
      output: a directory that does not exist yet, or is empty.
      encoder: makes the documents.
      on_bad_row: called once for every row that is not a conversation, or of which
        nothing is supervised in the context; if it returns, the row is skipped.
      validation_fraction: about this share of the conversations is held out, if no
        files are.
      chosen: `pattern` and `splits`, as of `list_inputs`.

    Raises:
      FileNotFoundError: an input does not exist.
      FileExistsError: `output` exists and is not empty.
      ValueError: an input does not hold rows, there is no conversation to train on, or
        the fraction is not between 0 and 1.
    """
    holdout = Holdout(validation_fraction)
    found = list_inputs(inputs, **chosen)
    with TokenFileWriter(
        output, encoder.template.tokenizer, has_loss_mask=True
    ) as writer:
        summary = Summary(writer, left_out=found.left_out)
        conversations = 0

        def skip(row: BadRow) -> None:
            on_bad_row(row)
            summary.skipped.add(row)

        for row, split in read_conversations(found.files):
            if isinstance(row, BadRow):
                skip(row)
            elif split is None:
                holdout.add(row.text)
        writer.add_sources(file.path for file in found.files)
        for conversation, split, documents in _encoded(found, encoder):
            if not documents:
                skip(BadRow(conversation.where, "no reply within the context"))
                continue
            conversations += 1
            split = split or holdout.split(conversation.text)
            for document in documents:
                writer.write(split, *document)
                summary.supervised[split] += int(document.is_supervised.sum())
        rows = conversations + summary.skipped.total()
        if not conversations:
            raise ValueError(
                "there is no conversation to train on in "
                f"{', '.join(map(str, inputs))}: {rows} rows were skipped"
            )
        summary.rows = f"{conversations:,} conversations of {rows:,} rows"
    return summary


def _encoded(
    inputs: Inputs, encoder: ChatEncoder
) -> Iterator[tuple[Conversation, str | None, list[Document]]]:
    rows = read_conversations(inputs.files)
    good = ((row, split) for row, split in rows if isinstance(row, Conversation))
    # Silent where standard error is not a terminal.
    shown = tqdm(good, desc="encoding", unit=" conversations", disable=None)
    for some in batched(shown, CONVERSATIONS_AT_A_TIME):
        documents = encoder.encode([conversation for conversation, _ in some])
        for (conversation, split), its_own in zip(some, documents, strict=True):
            yield conversation, split, its_own
