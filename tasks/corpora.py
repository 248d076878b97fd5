"""The corpora that `config.data.corpus` names: one, or several with their shares."""

import functools
from pathlib import Path

from ml_collections import ConfigDict

from data.balance import Balanced
from data.mixture import MixedOrder, MixedRows, check_alike, parse_mixture, shares
from data.packed import digest
from data.remote import as_path
from data.rows import ROW_PLANS, CorpusRows, InOrder, RowOrder, RowPlan, Shuffled
from data.text.corpus import prepare_standard_library
from data.text.tokens import token_file
from data.text.tokens.token_file import TokenFile
from data.text.tokens.tokenizer import ByteTokenizer
from tasks.config_errors import names_fields
from tasks.systems import document_mask

STANDARD_LIBRARY = Path("corpora/standard_library")
"""Where the default corpus is prepared."""
VOCAB_MULTIPLE = 8
"""A corpus's vocabulary is rounded up to it, to divide over the tensor axis."""


def named(config: ConfigDict) -> dict[str, float | None]:
    """Returns directories and weights (see `parse_mixture`); {}: the default corpus.

    Raises:
      ValueError: the field does not name corpora.
    """
    try:
        weights = parse_mixture(config.data.corpus) if config.data.corpus else {}
        for directory in weights:
            as_path(directory)
        return weights
    except (ImportError, NotImplementedError, ValueError) as error:
        raise ValueError(f"config.data.corpus={error}") from error


def directories(config: ConfigDict) -> list[Path]:
    """Returns the corpora; prepares the default one where it is missing."""
    paths = [as_path(name) for name in named(config)]
    return paths or [prepare_standard_library(STANDARD_LIBRARY)]


def vocab_size(config: ConfigDict) -> int:
    """Returns the rows of the embedding, V; reads no default corpus.

    That is config.model.vocab_size; where it is 0, the vocabulary of the tokenizer of
    config.data.corpus (of the default corpus: bytes), rounded up to `VOCAB_MULTIPLE`.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or damaged.
    """
    if config.model.vocab_size:
        return config.model.vocab_size
    try:
        sizes = [token_file.vocab_size(as_path(name)) for name in named(config)]
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{error}; or set config.model.vocab_size, which is the corpus's where "
            "it is 0"
        ) from error
    ids = max(sizes, default=ByteTokenizer.vocab_size)
    return -(-ids // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def identify(config: ConfigDict) -> tuple[str, str, str]:
    """Returns the data's field, its digest, and a note of what was not compared.

    The digest is of the weights too, where there are several corpora.

    Raises:
      FileNotFoundError, ValueError: the corpus is missing or damaged.
    """
    compare = config.data.compare_digests
    digests = []
    notes = []
    for directory in directories(config):
        of_corpus, note = token_file.identify(directory, compare=compare)
        digests.append(of_corpus)
        notes.append(note)
    whole = digests[0]
    if len(digests) > 1:
        whole = digest({"corpora": digests, "weights": [*named(config).values()]})
    return "data.corpus", whole, "; ".join(filter(None, notes))


def intervals(config: ConfigDict) -> int:
    """Returns how many intervals of keys a token sees, at most: more than 1 with trees.

    Raises:
      FileNotFoundError, ValueError: a corpus is missing or damaged.
    """
    directories = map(as_path, named(config))
    return max(map(token_file.intervals, directories), default=1)


@names_fields
def rows(config: ConfigDict, split: str, vocab_size: int) -> tuple[RowPlan, RowOrder]:
    """Returns the rows of a split, and their order: shuffled to train, else in order.

    Rows to train on are assigned to steps by their work, where the config says so.

    Raises:
      FileNotFoundError, ValueError: a corpus is missing or damaged, has tokens that a
        model of this vocabulary lacks, or another tokenizer than the first; or as
        `ROW_PLANS` and `document_mask`.
    """
    if config.data.rows not in ROW_PLANS:
        raise ValueError(f"{config.data.rows=} must be one of {', '.join(ROW_PLANS)}")
    weights = named(config)
    paths = map(as_path, weights or [STANDARD_LIBRARY])
    corpora = [TokenFile.open(path, split) for path in paths]
    for corpus in corpora:
        corpus.check_vocabulary(vocab_size)
    order: RowOrder = Shuffled(config.seed) if split == "train" else InOrder()
    tokens = config.data.context_tokens
    mask = document_mask(config)
    most = max(corpus.intervals for corpus in corpora)
    if most > 1:
        where = f"config.data.corpus={config.data.corpus!r}"
        check_trees(config, where)
        if config.data.rows != "whole":
            raise ValueError(
                f'{config.data.rows=} must be "whole" with {where}, which has trees'
            )
    cut = functools.partial(ROW_PLANS[config.data.rows], length=tokens, mask=mask)
    plans = [cut(corpus, intervals=most) for corpus in corpora]
    plan: CorpusRows | MixedRows = plans[0]
    if len(plans) > 1:
        check_alike(corpora)
        counts = [each.rows for each in plans]
        plan = MixedRows(plans)
        order = MixedOrder(counts, shares(weights, counts), order)
    if split == "train" and (steps := config.data.balanced_steps):
        order = Balanced(order, plan.work, config.data.batch_rows, steps)
    return plan, order


def check_trees(config: ConfigDict, trees: str) -> None:
    """Refuses windows and states, which would go through branches beside a token's own.

    trees: what has them, for messages.

    Raises:
      ValueError: the mask is not causal, layers have a window shorter than a row, or
        Gated DeltaNet.
    """
    window = config.model.window
    tokens = config.data.context_tokens
    wrong = ""
    if config.mask != "causal":
        wrong = f'{config.mask=} must be "causal"'
    elif 0 < window < tokens:
        wrong = f"{config.model.window=} must be 0, or at least {tokens} as a row"
    elif config.model.delta_convolution:
        wrong = "layers with Gated DeltaNet read one text in its order"
    if wrong:
        raise ValueError(
            f"{wrong}, with trees of {trees}: prepare_chat --apart makes documents"
        )
