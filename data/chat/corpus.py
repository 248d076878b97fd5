"""Writes conversations as token files, with loss on what assistants say.

Every conversation is a document, or several where it is longer than the context and
split. Rows of whole documents (`WholeRows`) then hold several, masked
from each other.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.chat.chat_template import ChatTemplate, Document
from data.chat.conversation import Conversation, read_conversations
from data.text.holdout import Holdout
from data.text.input_files import Inputs, list_inputs
from data.text.markup import SPECIAL, check_markup, names_special_tokens
from data.text.skipped import BadRow, Skipped, stop_at
from data.text.summary import Summary
from data.text.token_file import TokenFileWriter

TOO_LONG = {
    "truncate": "--too-long split, or a larger --context-tokens,",
    "split": "a larger --context-tokens",
}
"""What becomes of long conversations, and what would keep more of them."""
# Encoded together: enough for every core, and little enough to hold in memory.
CONVERSATIONS_AT_A_TIME = 64
LEAST_HELD_OUT = 32
"""Characters for each token of the context: 4 rows, with 8 characters in a token."""


class ChatEncoder:
    """Turns conversations into documents that fit in a context.

    A longer conversation is truncated: what is beyond the context is lost, and the turn
    that it cuts is supervised as far as it goes. Or it is split between exchanges, as
    many in a document as fit, each document with the system's words; only an exchange
    that is too long by itself is truncated.

    context: tokens in a document, at most.
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
        self.context = context_tokens
        self._splits = too_long == "split"
        self._why_cut = (
            f"longer than {context_tokens} tokens ({TOO_LONG[too_long]} keeps more)"
        )

    def encode(
        self,
        conversations: Sequence[Conversation],
        on_cut: Callable[[BadRow, int], None] = lambda row, tokens: None,
    ) -> list[list[Document] | BadRow]:
        """Returns the documents of each conversation, without unsupervised ones.

        A bad row is a conversation that the template refuses.

        on_cut: called for every other one of which a part is lost, with its tokens.
        """
        together = self.template.documents([c.messages for c in conversations])
        found: list[list[Document] | BadRow] = []
        for conversation, documents in zip(conversations, together, strict=True):
            if isinstance(documents, ValueError):
                found.append(BadRow(conversation.where, str(documents)))
                continue
            if self._splits and longest(documents) > self.context:
                documents = self._parts(conversation)
            cut = [Document(*(a[: self.context] for a in whole)) for whole in documents]
            # A document's first token is not a target.
            kept = [part for part in cut if part.is_supervised[1:].any()]
            found.append(kept)
            lost = sum(part.tokens.size for part in documents)
            lost -= sum(part.tokens.size for part in kept)
            if kept and lost:
                on_cut(BadRow(conversation.where, self._why_cut), lost)
        return found

    def _parts(self, conversation: Conversation) -> list[Document]:
        """Splits a conversation to documents, which may still be too long."""
        exchanges = conversation.exchanges
        first, parts = 0, []

        def documents(count: int) -> list[Document]:
            some = exchanges[first : first + count]
            (found,) = self.template.documents(
                [replace(conversation, exchanges=some).messages]
            )
            return [] if isinstance(found, ValueError) else found

        while first < len(exchanges):
            counts = range(1, len(exchanges) - first + 1)
            fitting = bisect_right(
                counts, self.context, key=lambda count: longest(documents(count))
            )
            count = max(fitting, 1)
            parts += documents(count)
            first += count
        return parts


def longest(documents: Sequence[Document]) -> int:
    """Returns the tokens of the longest document, 0 for none."""
    return max((document.tokens.size for document in documents), default=0)


def prepare_chats(
    inputs: Sequence[Path],
    output: Path,
    encoder: ChatEncoder,
    *,
    on_bad_row: Callable[[BadRow], None] = stop_at,
    validation_fraction: float | None = None,
    keep_markup: bool = False,
    **chosen: Any,
) -> Summary:
    """Writes the corpus `output` from files of conversations.

    Rows are read twice: all of them are checked before the first is encoded.

    Args:
      inputs: files of rows (see data/chat/conversation.py), and directories of them.
      output: a directory that does not exist yet, or is empty.
      encoder: makes the documents.
      on_bad_row: called once for every row that is not a conversation, or of which
        nothing is supervised in the context; if it returns, the row is skipped.
      validation_fraction: about this share of the conversations is held out, if no
        files are. None: 2 %, and of few conversations up to 10 %.
      keep_markup: whether most conversations may name special tokens in their words,
        where they are text.
      chosen: `pattern` and `splits`, as of `list_inputs`.

    Raises:
      FileNotFoundError: an input does not exist.
      FileExistsError: `output` exists and is not empty.
      ValueError: an input does not hold rows, there is no conversation to train on,
        most are markup, or the fraction is not between 0 and 1.
    """
    holdout = Holdout(validation_fraction, LEAST_HELD_OUT * encoder.context)
    found = list_inputs(inputs, **chosen)
    with TokenFileWriter(
        output, encoder.template.tokenizer, has_loss_mask=True
    ) as writer:
        writer.chat_template = encoder.template.source
        summary = Summary(writer, found)

        def skip(row: BadRow) -> None:
            on_bad_row(row)
            summary.skipped.add(row)

        conversations = _survey(found, holdout, summary, skip)
        if not _drops_system(encoder.template):
            summary.unwritten = Skipped()
        if not keep_markup:
            check_markup(summary.markup, conversations)
        writer.add_sources(file.path for file in found.files)
        encoded = _encoded(found, encoder, summary.add_cut)
        conversations = _write(encoded, holdout, summary, skip)
        rows = conversations + summary.skipped.total()
        if not conversations:
            raise ValueError(
                "there is no conversation to train on in "
                f"{', '.join(map(str, inputs))}: {rows} rows were skipped"
            )
        summary.rows = f"{conversations:,} conversations of {rows:,} rows"
    return summary


def _drops_system(template: ChatTemplate) -> bool:
    """Returns whether a template writes the same with the system's words as without."""
    talk = Conversation("", None, (("x", "y"),))
    without, given = template.documents(
        [replace(talk, system=system).messages for system in (None, "SYSTEM")]
    )
    if isinstance(without, ValueError) or isinstance(given, ValueError):
        return False  # each row is refused
    return np.array_equal(without[-1].tokens, given[-1].tokens)


def _survey(
    inputs: Inputs, holdout: Holdout, summary: Summary, skip: Callable[[BadRow], None]
) -> int:
    """Reads all rows; returns how many are conversations."""
    conversations = 0
    for row, split in read_conversations(inputs.files):
        if isinstance(row, BadRow):
            skip(row)
            continue
        conversations += 1
        if split is None:
            holdout.add(row.text)
        if names_special_tokens(row.text):
            summary.markup.add(BadRow(row.where, SPECIAL))
        if row.system is not None:
            summary.unwritten.add(BadRow(row.where, "the system's words"))
    return conversations


def _write(
    encoded: Iterable[tuple[Conversation, str | None, list[Document] | BadRow]],
    holdout: Holdout,
    summary: Summary,
    skip: Callable[[BadRow], None],
) -> int:
    """Writes documents into the summary's corpus; returns how many conversations."""
    conversations = 0
    for conversation, split, documents in encoded:
        if not documents:
            documents = BadRow(conversation.where, "no reply within the context")
        if isinstance(documents, BadRow):
            skip(documents)
            continue
        conversations += 1
        split = split or holdout.split(conversation.text)
        for document in documents:
            summary.writer.write(split, *document)
            summary.supervised[split] += int(document.is_supervised.sum())
    return conversations


def _encoded(
    inputs: Inputs, encoder: ChatEncoder, cut: Callable[[BadRow, int], None]
) -> Iterator[tuple[Conversation, str | None, list[Document] | BadRow]]:
    rows = read_conversations(inputs.files)
    good = ((row, split) for row, split in rows if isinstance(row, Conversation))
    # Silent where standard error is not a terminal.
    shown = tqdm(good, desc="encoding", unit=" conversations", disable=None)
    for some in batched(shown, CONVERSATIONS_AT_A_TIME):
        documents = encoder.encode([conversation for conversation, _ in some], cut)
        for (conversation, split), its_own in zip(some, documents, strict=True):
            yield conversation, split, its_own
