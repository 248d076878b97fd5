"""Loss and perplexity on a corpus, by the position of the tokens.

    python -m tools.evaluate loss --workdir=RUN
    python -m tools.evaluate loss --workdir=RUN --corpus corpora/books \\
        --config.data.context_tokens=100000 --output losses.json

The newest checkpoint reads the rows of --corpus (the run's own unless it is given) as a
validation of `train.py` does, in order, and the loss of every token is kept. Rows are
those of config.data, of any length, also of others than it was trained with; mesh and
ring may be others too. Positions are those in a token's document, by powers of two. The
standard error of a loss takes rows to be independent.
"""

import argparse
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import ml_collections
import numpy as np

from data import remote
from data.batch import Batch
from data.mixture import check_alike
from data.progress import progress
from data.rows import iterate
from data.text.tokens.token_file import TokenFile
from tasks import corpora
from tasks.command_line import CONFIG_FLAGS, Parser, as_program, at_least
from tasks.generation import restored_parameters
from tasks.layout_choice import padding_line
from tasks.text import TextRun
from tools.generate import text_config
from tools.lib.benchmarks.rows import check_output, table, write_rows
from training.sharding.feed import global_batch

COLUMNS = {
    "from": "{from:,}",
    "below": "{below:,}",
    "tokens": "{tokens:,}",
    "loss": "{loss:.4f}",
    "±": "{standard_error:.4f}",
    "perplexity": "{perplexity:,.2f}",
}
"""Of a part of the positions each, and of all of them last."""


def summed(
    losses: np.ndarray, weights: np.ndarray, positions: np.ndarray, parts: int
) -> np.ndarray:
    """Sums losses and weights of each row's tokens by powers of two of a position.

    Args:
      losses, weights, positions: (B, T), in any order.
      parts: part 0 is position 0, part k those from 2^(k - 1) to below 2^k.

    Returns:
      Losses and weights, float64 (2, B, parts).
    """
    part = np.frexp(positions)[1]  # bits of a whole number
    part = part + parts * np.arange(len(part))[:, None]
    weights = weights.astype(np.float64)
    # A token without a weight may have any loss.
    both = np.where(weights > 0, losses, 0) * weights, weights
    sums = [np.bincount(part.ravel(), x.ravel(), parts * len(part)) for x in both]
    return np.reshape(sums, (2, -1, parts))


def means(sums: np.ndarray) -> list[dict[str, Any]]:
    """Returns the mean loss of each part that has tokens, and of all of them."""
    rows = []
    for part in np.flatnonzero(sums[1].any(axis=0)).tolist():
        span = {"from": (1 << part) >> 1, "below": 1 << part}
        rows.append(_mean(sums[..., part]) | span)
    return [*rows, _mean(sums.sum(axis=-1)) | {"from": 0, "below": None}]


def _mean(sums: np.ndarray) -> dict[str, Any]:
    """Returns the mean of losses by weight, with rows as clusters of tokens.

    sums: losses and weights of each row, (2, B).
    """
    losses, weights = sums
    total = weights.sum()
    rows = int((weights > 0).sum())
    loss = losses.sum() / total
    error = None
    if rows > 1:
        rest = np.square(losses - loss * weights).sum() * rows / (rows - 1)
        error = math.sqrt(rest) / total
    return {
        "tokens": int(total),
        "loss": float(loss),
        "standard_error": error,
        "perplexity": float(np.exp(loss)),
    }


def set_corpus(config: ml_collections.ConfigDict, corpus: Path) -> None:
    """Makes another corpus the config's, if a run on its own can read it.

    Prints where its tokenizer cannot be compared.

    Raises:
      FileNotFoundError, ValueError: there is no such corpus, or its tokenizer is
        another than that of the run's corpus.
    """
    config.model.vocab_size = corpora.vocab_size(config)
    other = TokenFile.open(corpus, "train")
    before = [*corpora.named(config)][:1]
    if before and remote.as_path(before[0]).is_dir():
        check_alike([TokenFile.open(before[0], "train"), other])
    else:
        print(
            f"the run's corpus ({config.data.corpus or 'the default one'}) is not "
            f"here: nothing says that it had the tokenizer of {corpus}, "
            f"{other.tokenizer}"
        )
    config.data.corpus = str(corpus)


def token_losses(run: TextRun) -> Callable[[Any, Batch], jax.Array]:
    """Builds (parameters, batch in layout order) -> the loss of every token, [B, T]."""
    loss_sum = run.loss_function()

    def losses(parameters: Any, batch: Batch) -> jax.Array:
        # The summed loss is linear in the weights: its slopes are the tokens' losses.
        return jax.grad(
            lambda weights: loss_sum(parameters, batch._replace(loss_weights=weights))
        )(batch.loss_weights)

    options = run.compiler_options
    return jax.jit(losses, out_shardings=run.sharding, compiler_options=options)


def reader(
    run: TextRun, options: argparse.Namespace
) -> tuple[int, int, Callable[[Any], Iterator[np.ndarray]]]:
    """Returns how many rows there are, how many are read, and what yields their sums.

    Raises:
      FileNotFoundError, ValueError: something in the config or the options is wrong.
    """
    batches = run.batches("validation", fills=True)
    count = min(options.batches or len(batches), len(batches))
    shape = run.shape
    parts = shape[1].bit_length() + 1
    program = token_losses(run)
    threads = run.config.data.threads

    def sums(parameters: Any) -> Iterator[np.ndarray]:
        with contextlib.closing(iterate(batches, threads=threads)) as steps:
            for step, blocks in itertools.islice(steps, count):
                batch = global_batch(blocks, run.sharding, shape)
                losses = np.asarray(program(parameters, batch), np.float64)
                # Behind the last rows of a split the first ones fill up the batch.
                read = slice(batches.ordered - step * shape[0])
                weights = np.asarray(batch.loss_weights)[read]
                positions = np.asarray(batch.positions)[read]
                yield summed(losses[read], weights, positions, parts)

    return batches.rows, min(count * shape[0], batches.ordered), sums


def evaluate(
    config: ml_collections.ConfigDict, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns a row for each part of the positions, and one for all of them.

    Raises:
      FileNotFoundError, ValueError: something in the options or the config is wrong, or
        there is no checkpoint.
    """
    if options.corpus:
        set_corpus(config, options.corpus)
    corpora.directories(config)
    run = TextRun.of(config, jax.devices())
    rows, read, sums = reader(run, options)
    if padding := padding_line(run):
        print(padding)
    parameters, step = restored_parameters(run)
    tokens = config.data.context_tokens
    corpus = config.data.corpus or str(corpora.STANDARD_LIBRARY)
    print(
        f"{config.workdir}, step {step}, on {corpus} (validation): {read:,} of "
        f"{rows:,} rows of {tokens:,} tokens",
        flush=True,
    )
    parts = []
    with progress(read, " rows") as bar:
        for part in sums(parameters):
            parts.append(part)
            bar.update(part.shape[1])
    summed_rows = np.concatenate(parts, axis=1)
    if not summed_rows[1].any():
        raise ValueError(f"no token of these rows of {corpus} has a loss")
    about = {"run": config.workdir, "step": step, "corpus": corpus}
    about |= {"split": "validation", "rows": read, "context_tokens": tokens}
    return [about | row for row in means(summed_rows)]


def _options(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(__doc__, epilog=CONFIG_FLAGS, prog="python -m tools.evaluate loss")
    add = parser.add_argument
    add(
        "--corpus",
        type=remote.as_path,
        help="directory of prepare_text (default: the run's)",
    )
    add("--batches", type=at_least(1), help="of config.data.batch_rows (default: all)")
    add("--output", type=Path, help="file of rows to write, a new one")
    return parser.parse_known_args(arguments)


@as_program
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program."""
    options, rest = _options(arguments)
    config = text_config(rest)
    if options.output:
        check_output(options.output)
    rows = evaluate(config, options)
    print(table(rows, COLUMNS))
    if options.output:
        write_rows(options.output, rows)
