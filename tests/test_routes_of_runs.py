"""A packed corpus end to end: each route of a ring gives one device's losses.

With `-s` and `-m ""` they print what a device sends in a step on each.
"""

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.text.corpus import prepare
from data.text.tokens.tokenizer import ByteTokenizer
from kernels.cost.choice import Choice
from kernels.layouts import Layout, Striped
from kernels.ring import routes
from kernels.ring.comm import Ring
from tasks import layout_choice, systems
from tasks.text import TextRun
from tests.cases import in_tiers
from tests.small.runs import Run

pytestmark = pytest.mark.thorough

STEPS, ROWS, TOKENS = 4, 8, 320
LAYERS = 2


def fields_of(
    attention: str, ring: int, ulysses: int = 1, pattern: str = ""
) -> dict[str, Any]:
    mesh = {"fsdp": 8 // ring // ulysses, "ring": ring, "ulysses": ulysses}
    return {f"mesh__{axis}": size for axis, size in mesh.items()} | {
        "attention": attention,
        "model__layer_pattern": pattern,
        "model__window": 9 * bool(pattern),
    }


def bytes_of(ring: int, ulysses: int = 1) -> int:
    """Of a shard's keys and values in all layers: of 2 heads of 8, in float32."""
    rows, tokens = ROWS * ring * ulysses // 8, TOKENS // ring
    return LAYERS * 2 * 4 * rows * tokens * 2 * 8 // ulysses


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of documents of 2 to 29 tokens, for rows of 320: shards of 40 or 80."""
    rng = np.random.default_rng(11)
    directory = tmp_path_factory.mktemp("short")
    documents, words = directory / "documents", ["ring", "hop", "a", "key", "row"]
    documents.mkdir()
    for number in range(800):
        text = " ".join(rng.choice(words, rng.integers(1, 8)))[:28]
        (documents / f"{number}.txt").write_text(text)
    prepare([documents], directory / "corpus", ByteTokenizer())
    return directory / "corpus"


def run_of(corpus: Path, workdir: Path, **fields: Any) -> Run:
    fields |= {"data__context_tokens": TOKENS, "data__batch_rows": ROWS}
    fields |= {"train__steps": STEPS, "train__validation_batches": 0}
    fields |= {"checkpoint__save_every_steps": 0, "metrics": ()}
    fields |= {"implementation": "reference"}
    return Run(corpus, workdir, **fields)


def counting(counts: bool) -> Callable[..., list[Choice]]:
    """Lets runs count the steps of their rings, or not, whatever it costs."""

    def options(layouts: Iterable[Layout], may_count: bool) -> list[Choice]:
        return [Choice(x, counts and may_count and x != Striped()) for x in layouts]

    return options


def losses(run: Run) -> np.ndarray:
    run.train()
    return np.array([loss for _, loss in run.points()["loss/train"]])


@pytest.fixture(scope="module")
def truth(short_documents, tmp_path_factory):
    """Losses on devices that each have whole rows, by the layers' pattern."""

    def on_one_device(pattern: str) -> np.ndarray:
        fields = fields_of("vanilla", 1, 1, pattern)
        return losses(run_of(short_documents, tmp_path_factory.mktemp("run"), **fields))

    return functools.cache(on_one_device)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all that devices hand on, while programs run."""
    found, shift = [], Ring.shift

    def count(x: Any) -> Any:
        found.append(x.nbytes)
        return x

    def seen(x: jax.Array) -> jax.Array:
        return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def counted(ring: Ring, arrays: Any, shifts: int) -> Any:
        return shift(ring, jax.tree.map(seen, arrays), shifts)

    monkeypatch.setattr(Ring, "shift", counted)
    return found


@pytest.mark.parametrize("route", in_tiers("runs.txt", "routes"), ids=str)
def test_a_packed_corpus_has_one_devices_losses(
    short_documents, tmp_path, truth, sent, monkeypatch, route
):
    attention, ring, ulysses, pattern, counts, both = route
    want = truth(pattern)
    sent.clear()
    monkeypatch.setattr(routes, "rings_both_ways", lambda kind: both)
    monkeypatch.setattr(layout_choice, "options", counting(counts))
    fields = fields_of(attention, ring, ulysses, pattern)
    got = losses(run_of(short_documents, tmp_path, **fields))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len(got) == STEPS and want[-1] < want[0]
    # Where every shard goes round, backward beside its gradients, which also go home.
    whole = bytes_of(ring, ulysses) * (2 * (ring - 1) + ring)
    each = sum(sent) / 8 / STEPS
    print(f"{each:,.0f} bytes, {each / whole:.1%} of {whole:,}")
    # Striped, documents lie on all devices.
    ends, has_windows = (x and attention != "striped" for x in (counts, pattern))
    if not ends and not has_windows:
        assert each == whole
    else:
        assert each < (0.45 if ends and has_windows else 0.9) * whole


def test_a_ring_of_short_documents_takes_the_steps_that_its_batches_need(
    short_documents, tmp_path, sent, monkeypatch
):
    monkeypatch.setattr(layout_choice, "options", counting(True))
    run = run_of(short_documents, tmp_path, **fields_of("ring", 8))
    partition = systems.partition(run.config(), jax.devices())
    batches = TextRun(run.config(), partition).batches("train")
    hops = 0
    for blocks in (batches[step] for step in range(STEPS)):
        hops += max(
            (block.columns[0] - batch.k_start.min()).clip(0) // (TOKENS // 8) + 1
            for block, batch in blocks.items()
        )
    run.train()
    assert sum(sent) / 8 == bytes_of(8) * 4 * hops  # there, back, and gradients home
    assert hops < STEPS * 4
