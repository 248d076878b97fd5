"""A packed corpus end to end: each route of a ring gives one device's losses.

With `-s` and `-m ""` they print what a device sends in a step on each.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.text.corpus import prepare
from data.text.tokenizer import ByteTokenizer
from kernels.ring.comm import Ring
from tasks import systems
from tasks.run import Run as TaskRun
from tasks.text import TextRun
from tests.runs import Run

pytestmark = pytest.mark.thorough

STEPS, ROWS, TOKENS = 4, 8, 320
# The package has a function of this name.
ring_attention = importlib.import_module("kernels.ring_attention")
LAYERS = 2


@dataclasses.dataclass(frozen=True)
class Route:
    """Where a run's keys go.

    layers: both "full", or the first with a window, "mixed". counts: whether packed
      documents end its rings. goes_both_ways: as between TPUs.
    """

    attention: str
    ring: int
    ulysses: int = 1
    layers: str = "full"
    counts: bool = True
    goes_both_ways: bool = False

    def __str__(self) -> str:
        mesh = f"{self.attention}-{self.ring}x{self.ulysses}-{self.layers}"
        return mesh + "-all" * (not self.counts) + "-both" * self.goes_both_ways

    @property
    def fields(self) -> dict[str, Any]:
        mesh = {"fsdp": 8 // self.ring // self.ulysses}
        mesh |= {"ring": self.ring, "ulysses": self.ulysses}
        return {f"mesh__{axis}": size for axis, size in mesh.items()} | {
            "attention": self.attention,
            **layer_fields(self.layers),
        }

    @property
    def is_counted(self) -> bool:
        """Whether its rings are: those in which documents lie together."""
        return self.counts and self.attention != "striped"

    @property
    def whole(self) -> int:
        """Bytes that a device sends in a step where every shard goes round, backward
        beside its gradients, which also go home."""
        rows, tokens = ROWS * self.ring * self.ulysses // 8, TOKENS // self.ring
        shard = 2 * 4 * rows * tokens * 2 * 8 // self.ulysses  # of 2 heads of 8
        return LAYERS * shard * (2 * (self.ring - 1) + self.ring)


def layer_fields(layers: str) -> dict[str, Any]:
    pattern = {"full": "", "mixed": "wf"}[layers]
    return {"model__layer_pattern": pattern, "model__window": 9 * bool(pattern)}


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


class Trained:
    """Runs of a corpus, each made once."""

    def __init__(self, corpus: Path, directory: Path):
        self.corpus, self.directory = corpus, directory

    def run(self, name: str, **fields: Any) -> Run:
        fields |= {"data__context_tokens": TOKENS, "data__batch_rows": ROWS}
        fields |= {"train__steps": STEPS, "train__validation_batches": 0}
        fields |= {"checkpoint__save_every_steps": 0, "metrics": ()}
        return Run(self.corpus, self.directory / name, **fields)

    def losses(self, name: str, **fields: Any) -> np.ndarray:
        run = self.run(name, **fields)
        run.train()
        return np.array([loss for _, loss in run.points()["train/loss"]])

    def on_one_device(self, layers: str) -> np.ndarray:
        mesh = {"mesh__fsdp": 8, "mesh__ring": 1, "attention": "vanilla"}
        return self.losses(f"vanilla-{layers}", **mesh, **layer_fields(layers))


@pytest.fixture(scope="module")
def trained(short_documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(short_documents, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def truth(trained: Trained) -> Callable[[str], np.ndarray]:
    """Losses on devices that each have whole rows, by the model's layers."""
    return functools.cache(trained.on_one_device)


def each_route(*quick: Route) -> Any:
    """All routes, of which those that are not quick are slow tests."""
    rings = [
        Route(attention, ring, 1, layers)
        for attention in ("ring", "zigzag", "striped")
        for ring in (4, 8)
        for layers in ("full", "mixed")
    ]
    whole = dict(counts=False, goes_both_ways=True)
    both = [dataclasses.replace(r, **whole) for r in rings if r.layers == "full"]
    ulysses = [dataclasses.replace(r, ulysses=2) for r in rings if r.ring == 4]
    found = dict.fromkeys((*quick, *rings, *both, *ulysses))
    return pytest.mark.parametrize(
        "route",
        [
            pytest.param(r, marks=[] if r in quick else pytest.mark.slow, id=str(r))
            for r in found
        ],
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of all that devices hand on, while programs run."""
    found, shift = [], Ring.shift

    def count(x: Any) -> Any:
        found.append(x.nbytes)
        return x

    def seen(x: jax.Array) -> jax.Array:
        return jax.pure_callback(count, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def counted(ring: Ring, arrays: Any, order: Any, shifts: int = 1) -> Any:
        return shift(ring, jax.tree.map(seen, arrays), order, shifts)

    monkeypatch.setattr(Ring, "shift", counted)
    return found


def take(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    both_ways = route.goes_both_ways
    monkeypatch.setattr(ring_attention, "rings_both_ways", lambda: both_ways)
    if not route.counts:
        monkeypatch.setattr(TaskRun, "counts_steps", lambda *_: False)


@each_route(
    Route("zigzag", 4, 2, "mixed"),
    Route("striped", 4, 1, "mixed", counts=False, goes_both_ways=True),
)
def test_a_packed_corpus_has_one_devices_losses(
    trained, truth, route, sent, monkeypatch
):
    want = truth(route.layers)
    sent.clear()
    take(route, monkeypatch)
    got = trained.losses(str(route), **route.fields)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len(got) == STEPS and want[-1] < want[0]
    each = sum(sent) / 8 / STEPS
    print(f"{route}: {each:,.0f} bytes, {each / route.whole:.1%} of {route.whole:,}")
    has_windows = route.layers == "mixed" and route.attention != "striped"
    if not route.is_counted and not has_windows:
        assert each == route.whole
    elif route.is_counted and has_windows:
        assert each < 0.45 * route.whole
    else:
        assert each < 0.9 * route.whole


def test_a_ring_of_short_documents_takes_the_steps_that_its_batches_need(
    trained, sent, monkeypatch
):
    route, length = Route("ring", 8), TOKENS // 8
    run = trained.run("counted", **route.fields)
    partition = systems.partition(run.config(), jax.devices())
    batches = TextRun(run.config(), partition).batches("train")
    hops = 0
    for blocks in (batches[step] for step in range(STEPS)):
        hops += max(
            (block.columns[0] - batch.k_start.min()).clip(0) // length + 1
            for block, batch in blocks.items()
        )
    run.train()
    shard = 2 * 4 * ROWS * length * 2 * 8
    assert sum(sent) / 8 == LAYERS * shard * 4 * hops  # there, back, and gradients home
    assert hops < STEPS * 4
