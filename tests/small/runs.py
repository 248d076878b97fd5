"""Runs of `train.train` that are small enough for tests: their config and corpus."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict
from tensorboard.backend.event_processing import event_accumulator, io_wrapper

import train
from configs import tiny
from data.text.corpus import prepare
from data.text.tokens.tokenizer import ByteTokenizer
from tasks.text import TextRun
from tests.cases import table
from tests.support.processes import run_program
from training.saved.checkpoint import Checkpoints
from training.step import TrainState


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


SMALL = dict(table("runs.txt", "small"))
"""What makes configs/tiny.py a model and a batch that are compiled in seconds."""

KINDS: dict[str, dict[str, str]] = dict(table("runs.txt", "kind"))
"""Kinds of optimizers, and of what they store where: fields of `config.optimizer`."""


def small_config(corpus: Path, workdir: Path, **overrides: Any) -> ConfigDict:
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


@contextlib.contextmanager
def kept_in(directory: Path | None) -> Iterator[None]:
    """Compiles once what several runs of this process have in common.

    directory: of the programs; None for that of each run.
    """
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", directory and str(directory))
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def files(directory: Path) -> dict[str, bytes]:
    """The content of every file in a directory, to see that nothing changes."""
    found = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Every point of the curves below a directory, (step, value), in their order."""
    (run,) = io_wrapper.GetLogdirSubdirectories(str(directory))
    every = {event_accumulator.SCALARS: 0}
    found = event_accumulator.EventAccumulator(run, size_guidance=every).Reload()
    tags = found.Tags()["scalars"]
    return {tag: [(x.step, x.value) for x in found.Scalars(tag)] for tag in tags}


def checkpoints_of(config: ConfigDict) -> Checkpoints:
    """The checkpoints of a run with this config."""
    directory = Path(config.workdir) / "checkpoints"
    fingerprint = TextRun.of(config, jax.devices()).fingerprint
    return Checkpoints(directory, keep=3, fingerprint=fingerprint)


class Run:
    """A workdir, and what was said there."""

    def __init__(self, corpus: Path, workdir: Path, **fields: Any):
        """fields: that its config has besides those of `small_config`."""
        self.corpus, self.workdir, self.fields = corpus, workdir, fields
        self.said: list[str] = []

    def train(self, **overrides: Any) -> dict[str, float]:
        return train.train(self.config(**overrides), self.said.append)

    def command(self, **overrides: Any) -> None:
        """`python train.py` with the same config, given as flags."""
        status, printed, errors = run_program("train.py", *self.flags(**overrides))
        assert status == 0, errors
        self.said += printed.splitlines()

    def config(self, **overrides: Any) -> ConfigDict:
        return small_config(self.corpus, self.workdir, **self.fields | overrides)

    def flags(self, **overrides: Any) -> list[str]:
        return small_flags(self.corpus, self.workdir, **self.fields | overrides)

    def has_checkpoint(self, step: int) -> bool:
        return (self.workdir / "checkpoints" / str(step)).is_dir()

    def curves(self) -> dict[str, list[tuple[int, float]]]:
        return read_scalars(self.workdir / "tensorboard")

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Those of metrics.jsonl, by tag."""
        found: dict[str, list[tuple[int, float]]] = {}
        for line in (self.workdir / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            step, _ = row.pop("step"), row.pop("time")
            for tag, value in row.items():
                found.setdefault(tag, []).append((step, value))
        return found

    def curve(self, tag: str = "loss/train") -> list[tuple[int, float]]:
        return self.curves()[tag]

    def losses(self, after: int = 0) -> np.ndarray:
        """Loss of each step after this one; every step has to be there once."""
        steps, losses = zip(*self.curve(), strict=True)
        assert list(steps) == list(range(steps[0], steps[0] + len(steps)))
        return np.array(losses)[np.array(steps) > after]

    def state(self) -> TrainState:
        """The newest checkpoint's."""
        config = self.config()
        shapes = TextRun.of(config, jax.devices()).state_like
        with checkpoints_of(config) as checkpoints:
            return checkpoints.restore(shapes)[0]

    def files(self) -> dict[str, bytes]:
        return files(self.workdir)


def assert_equal_bits(state: Any, truth: Any) -> None:
    def assert_equal(path: Any, *leaves: jax.Array) -> None:
        ours, true = ((x.dtype, np.asarray(x).tobytes()) for x in leaves)
        assert ours == true, f"{jax.tree_util.keystr(path)} differs"

    jax.tree_util.tree_map_with_path(assert_equal, state, truth)
