"""Writes conversations as token files, with loss on what assistants say.

Every conversation is a document, or several where it is longer than the context and
split. Rows of whole documents (`WholeRows`) then hold several, masked from each other.
"""

import copy
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from data.chat.chat_template import ChatTemplate
from data.chat.conversation import Conversation, Row, read_conversations
from data.chat.shown import show
from data.text.corpus import Summary, write_corpus
from data.text.reading.parts import Counts
from data.text.reading.row_files import InputFile
from data.text.reading.skipped import SPECIAL, BadRow, names_special_tokens
from data.text.tokens.prefix_tree import Document, join_within
from data.text.tokens.token_file import TokenFileWriter

TOO_LONG = {
    "truncate": "--too-long split, or a larger --context-tokens,",
    "split": "a larger --context-tokens",
}
"""What becomes of long conversations, and what would keep more of them."""
LEAST_HELD_OUT = 32
"""Characters for each token of the context: 4 rows, with 8 characters in a token."""


class ChatEncoder:
    """Reads conversations, and makes documents of them that fit in a context.

    Its methods are described in `data.text.corpus.Rows`. A longer conversation is
    truncated: its tokens beyond the context are lost, and the turn that it cuts is
    supervised as far as it goes. Or it is split between exchanges, as many in a
    document as fit, each document with the system's words; only an exchange that is too
    long by itself is truncated. The documents of a conversation, and the conversations
    of a group, are trees, as many of them in one as fit.

    context: tokens in a document, at most; 2 or more.
    """

    wanted = "conversation to train on"
    counted = "conversations"

    def __init__(
        self,
        template: ChatTemplate,
        *,
        context_tokens: int,
        too_long: str = "truncate",
        apart: bool = False,
        fields: Mapping[str, str] | None = None,
    ):
        """Keeps its arguments.

        too_long: one of `TOO_LONG`. apart: no trees. fields: of rows, what they are
        called in the files, by our names.
        """
        self.template = template
        self._fields = fields
        self._apart = apart
        self.context = context_tokens
        self._splits = too_long == "split"
        self._why_divided = f"together more than {context_tokens} tokens"
        self._why_cut = (
            f"longer than {context_tokens} tokens ({TOO_LONG[too_long]} keeps more)"
        )

    def show(self, files: Sequence[InputFile], count: int) -> Iterator[str]:
        """Yields the first conversations of the files as the model will see them."""
        alone = copy.copy(self)
        alone._apart = True
        rows = (row for row in self.read(files) if isinstance(row, Row))
        encoded = (alone._encode(row, Counts()) for row in rows)
        good = (documents for documents in encoded if isinstance(documents, list))
        for number, documents in enumerate(islice(good, count), 1):
            for part, document in enumerate(documents, 1):
                of = f", document {part} of {len(documents)}" * (len(documents) > 1)
                shown = show(document, self.template.tokenizer)
                yield f"conversation {number}{of}:\n{shown}"

    def read(self, files: Sequence[InputFile]) -> Iterator[Row | BadRow]:
        return read_conversations(files, self._fields)

    def encode(
        self, rows: Sequence[Row], counts: Counts | None = None
    ) -> list[list[Document] | BadRow]:
        """Returns the documents of each row, without unsupervised ones.

        A bad row is a conversation that the template refuses, or that has no supervised
        document. `counts` has the tokens that are lost of the others.
        """
        counts = counts or Counts()
        return [self._encode(row, counts) for row in rows]

    def _encode(self, row: Row, counts: Counts) -> list[Document] | BadRow:
        # Answers that are alike add up.
        counts.weighted += len(row.paths) > 1 or bool(row.paths[0].weights)
        template = self.template
        is_named = any(template.stays_text(p.messages, p.tools) for p in row.paths)
        if is_named or names_special_tokens(row.text):
            counts.markup.add(BadRow(row.where, SPECIAL))
        for name, count in row.unread.items():
            counts.unread.add(BadRow(row.where, name), count)
        lost = [template.unwritten(path.messages, path.tools) for path in row.paths]
        for part in dict.fromkeys(chain.from_iterable(lost)):
            counts.unwritten.add(BadRow(row.where, part))
        try:
            paths = [self._parts(path) for path in row.paths]
        except ValueError as error:
            return BadRow(row.where, str(error))
        whole = [*chain.from_iterable(chain.from_iterable(paths))]
        # Parts of one conversation are trees of their own, as they share little.
        trees = paths[0] if len(paths) == 1 else [whole]
        documents = []
        kept = 0
        for tree in trees:
            cut = []
            for text in tree:
                weights = text.loss_weights[: self.context]
                # A document's first token is not a target.
                if weights[1:].any():
                    cut.append(Document(text.tokens[: self.context], weights))
            kept += sum(text.tokens.size for text in cut)
            joined = cut if self._apart else join_within(cut, self.context)
            if 1 < len(joined) < len(cut):
                counts.divided.add(BadRow(row.where, self._why_divided))
            documents += joined
        counts.apart += kept
        counts.turns += row.turns
        lost = sum(text.tokens.size for text in whole) - kept
        if documents and lost:
            counts.cut.add(BadRow(row.where, self._why_cut))
            counts.lost += lost
        return documents or BadRow(row.where, "no reply within the context")

    def _documents(self, conversation: Conversation) -> list[Document]:
        """Returns the documents of a conversation."""
        turns = conversation.messages
        weights = conversation.weights
        return self.template.documents(turns, weights, conversation.tools)

    def _parts(self, conversation: Conversation) -> list[list[Document]]:
        """Returns a conversation's documents; of its parts, where it is to be split."""
        whole = self._documents(conversation)
        if not self._splits or longest(whole) <= self.context:
            return [whole]
        parts = []
        rest = conversation
        while rest.exchanges:
            counts = range(1, len(rest.exchanges) + 1)
            size = partial(self._size, rest)
            count = max(bisect_right(counts, self.context, key=size), 1)
            parts.append(self._documents(rest.part(0, count)))
            rest = rest.part(count, None)
        return parts

    def _size(self, conversation: Conversation, count: int) -> int:
        """Returns the tokens of the first exchanges of a conversation."""
        return longest(self._documents(conversation.part(0, count)))


def longest(documents: Sequence[Document]) -> int:
    """Returns the tokens of the longest document, 0 for none."""
    return max((document.tokens.size for document in documents), default=0)


def prepare_chats(
    inputs: Sequence[Path], output: Path, encoder: ChatEncoder, **options: Any
) -> Summary:
    """Writes the corpus `output` from files of conversations (see `write_corpus`).

    A row is bad that is not a conversation, or of which nothing is supervised in the
    context. Of markup, names of special tokens are looked for.

    Args:
      inputs: files of rows (see data/chat/conversation.py), and directories of them.
      output: a directory that does not exist yet, or is empty.
      encoder: makes the documents.
      options: of `write_corpus`, which lists the errors.
    """
    template = encoder.template
    writer = TokenFileWriter(output, template.tokenizer, has_loss_mask=True)
    writer.chat_template = template.source
    least = LEAST_HELD_OUT * encoder.context
    return write_corpus(writer, encoder, inputs, least_held_out=least, **options)
