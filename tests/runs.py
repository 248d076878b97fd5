"""Runs of `train.train` that are small enough for tests: their config and corpus."""

from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

from configs import tiny
from data.corpus import prepare
from data.tokenizer import ByteTokenizer


def prepare_corpus(directory: Path) -> Path:
    """Writes documents of unlike lengths, which repeat themselves, so that they teach.

    Returns:
      The corpus, of about 20,000 training tokens.
    """
    rng = np.random.default_rng(7)
    words = ["ring", "stripe", "a", "token", "of", "sequence", "hops\n", "und", "sieht"]
    documents = directory / "documents"
    documents.mkdir()
    for number in range(60):
        text = " ".join(rng.choice(words, rng.integers(1, 150)))
        (documents / f"{number}.txt").write_text(text)
    corpus = directory / "corpus"
    prepare([documents], corpus, ByteTokenizer(), validation_fraction=0.15)
    return corpus


# What makes configs/tiny.py a model and a batch that are compiled in seconds.
SMALL = {
    "data.context_tokens": 80,
    "data.batch_rows": 4,
    "model.hidden_size": 32,
    "model.feed_forward_size": 88,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "optimizer.warmup_steps": 2,
    "train.steps": 20,
    "train.extra_steps": 0,
    "train.log_every_steps": 1,
    "train.validate_every_steps": 10,
    "train.validation_batches": 2,
    "checkpoint.save_every_steps": 10,
}


def small_config(
    corpus: Path, workdir: Path, **overrides: Any
) -> ml_collections.ConfigDict:
    """`configs/tiny.py`, made small.

    overrides: fields of the config by dotted name, with `__` for the dot.
    """
    config = tiny.get_config()
    config.update_from_flattened_dict(_fields(corpus, workdir, overrides))
    return config


def small_flags(corpus: Path, workdir: Path, **overrides: Any) -> list[str]:
    """The arguments of `python train.py` that mean `small_config`."""
    fields = _fields(corpus, workdir, overrides)
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    return ["--config=configs/tiny.py", *flags]


def _fields(corpus: Path, workdir: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    places = {"data.corpus": str(corpus), "workdir": str(workdir)}
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    return SMALL | places | names
