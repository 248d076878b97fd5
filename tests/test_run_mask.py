"""The mask of a run and its model's windows: what a step counts, and what it reads.

And when its rings end where the documents of its batches do.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from data.batch import Batch
from data.document_mask import DocumentMask
from data.text.tokens.token_file import TokenFileWriter
from data.text.tokens.tokenizer import ByteTokenizer
from kernels import layouts
from kernels.layouts import permute, unpermute
from kernels.masks import Visible
from tasks.layout_choice import layout_line
from tasks.systems import attention_system
from tasks.text import TextRun
from tests.cases import table
from tests.small.models import partition_of
from tests.small.runs import small_config
from training.sharding.feed import host_blocks
from training.sharding.mesh import MeshShape, Partition

MASKS = ["causal", "window(7)", "prefix(9)"]
PATTERNS = {"": 2, "w": 2, "wwf": 4, "wf": 3}
"""Layers by pattern; some are left over."""


def batch_of(config: Any, split: str = "train") -> Batch:
    """The first batch of a run on one device."""
    run = TextRun(config, partition_of(MeshShape()))
    (batch,) = run.batches(split)[0].values()
    return batch


def brute_force(batch: Batch, mask: str, windows: list[int]) -> tuple[int, float]:
    """Tokens, and pairs of a mean layer, of a batch in natural order."""
    size = int("".join(filter(str.isdigit, mask)) or 0)
    real = batch.k_end > batch.k_start
    document = np.cumsum(batch.positions == 0, axis=1)
    same = document[:, :, None] == document[:, None]
    same &= real[:, :, None] & real[:, None]
    index = np.arange(batch.tokens.shape[1])
    behind = index[:, None] - index
    shown = behind >= 0
    if mask.startswith("window"):
        shown = shown & (behind < size)
    elif mask.startswith("prefix"):
        shown = shown | (batch.positions < size)[:, None]
    pairs = [
        (same & shown & ((behind >= 0) & (behind < w) if w else True)).sum()
        for w in windows
    ]
    return real.sum(), sum(pairs) / len(windows)


@pytest.mark.parametrize("rows, mask, pattern", table("runs.txt", "masks"))
def test_tokens_and_pairs_are_those_counted_one_by_one(corpus, rows, mask, pattern):
    fields = {"mask": mask, "data__rows": rows, "data__context_tokens": 400}
    fields |= {"model__layer_pattern": pattern, "model__num_layers": PATTERNS[pattern]}
    fields |= {"model__window": 5 if "w" in pattern else 0, "attention": "vanilla"}
    config = small_config(corpus, "", **fields)
    task = TextRun(config, partition_of(MeshShape()))
    windows = [kind.window for kind in task.model.config.layer_kinds]
    assert windows.count(5) == (pattern * 4)[: len(windows)].count("w")
    objectives = {"train": task.objective, "validation": task.held_out}
    for split, objective in objectives.items():
        batch = batch_of(config, split)
        tokens, pairs = brute_force(batch, mask, windows)
        got = objective.count(batch)
        assert float(got.tokens) == tokens
        assert float(got.pairs) == pytest.approx(pairs, rel=1e-6)
        assert got.weights.sum() == batch.loss_weights.sum() > 0
        for layout in layouts.Contiguous(), layouts.Striped(), layouts.Zigzag():
            moved = Batch(*(permute(x, layout, 4) for x in batch))
            assert objective.count(moved).pairs == pytest.approx(pairs, rel=1e-6)


@pytest.mark.parametrize("attention", ["ring", "striped", "zigzag"])
def test_rows_of_every_layout_have_the_runs_mask(corpus, attention):
    """In both splits, as on one device; and each block is read once."""
    for mask, split in itertools.product(MASKS, ("train", "validation")):
        config = small_config(corpus, "", attention="vanilla", mask=mask)
        plain = batch_of(config, split)
        config.attention = attention
        layout = attention_system(config).layout
        run = TextRun(config, partition_of(MeshShape(fsdp=2, ring=4)))
        blocks = host_blocks(run.sharding, run.shape)
        assert len({*blocks}) == len(blocks) == 8
        for block, batch in run.batches(split)[0].items():
            for name, part in batch._asdict().items():
                whole = permute(getattr(plain, name), layout, 4)
                wanted = whole[slice(*block.rows), slice(*block.columns)]
                np.testing.assert_array_equal(part, wanted, err_msg=name)


@pytest.mark.parametrize("mask", [*MASKS, "window(1)", "prefix(64)"])
def test_what_a_ring_may_send_holds_all_that_documents_show(mask, rng):
    """Keys outside of it would not be attended to."""
    run, length = DocumentMask.parse(mask), 64
    index = np.arange(length, dtype=np.int32)
    outer = Visible(*(bound[0] for bound in run.within()(index, length)))
    edges = [rng.choice(np.arange(1, length), n, replace=False) for n in (0, 3, 20)]
    for starts in (np.sort(np.append(0, more)) for more in edges):
        document = np.searchsorted(starts, index, side="right") - 1
        ends = np.append(starts[1:], length)
        k_start, k_end = run.bounds(index, starts[document], ends[document])
        assert (outer.k_start <= k_start).all() and (k_end <= outer.k_end).all()


def attended(config: Any, shape: MeshShape, operands: Any, window: int | None) -> Any:
    """Returns the program of the config's attention, and its operands in its order."""
    partition, layout = partition_of(shape), attention_system(config).layout
    attend = TextRun(config, partition).attention

    def program(q, k, v, k_start, k_end):
        return attend(q, k, v, visible=Visible(k_start, k_end), window=window)

    return jax.jit(program), [permute(x, layout, shape.ring) for x in operands]


@pytest.mark.thorough(quick=3)
@pytest.mark.parametrize("attention, mask, window", table("runs.txt", "seen"))
def test_a_rings_attention_is_one_devices(corpus, rng, attention, mask, window):
    """Of bounds that only the running program knows, as those of batches."""
    config = small_config(corpus, "", mask=mask, implementation="reference")
    config.attention = "vanilla"
    rows = batch_of(config)
    q, k, v = rng.standard_normal((3, *rows.tokens.shape, 2, 8), np.float32)
    operands = q, k, v, rows.k_start, rows.k_end
    program, arrays = attended(config, MeshShape(), operands, window)
    want = program(*arrays)
    config.attention = attention
    program, arrays = attended(config, MeshShape(ring=8), operands, window)
    got = unpermute(program(*arrays), attention_system(config).layout, 8)
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert np.abs(want).max() > 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpora of "short" documents, of 300 tokens, and of "long" ones, of 20,000."""
    found = tmp_path_factory.mktemp("corpora")
    for name, length in (("short", 300), ("long", 20_000)):
        with TokenFileWriter(found / name, ByteTokenizer()) as writer:
            for split in ("train", "validation"):
                for _ in range(60_000 // length):
                    writer.write(split, np.full(length, 65))
    return found


def run_on(
    directory: Path, corpus: str, mesh: dict[str, int], **fields: Any
) -> TextRun:
    fields = {"data__context_tokens": 8192} | fields
    config = small_config(directory / corpus, "", **fields)
    mesh_of = MeshShape(**mesh).abstract_mesh("TPU v5 lite")
    return TextRun(config, Partition(mesh_of))


def test_rows_are_drawn_from_the_corpus_that_the_config_names(directory):
    rows = run_on(directory, "short", {}).rows
    assert len(rows) == 8
    for row in rows:
        (starts,) = np.nonzero(np.diff(row.k_start))
        assert set(np.diff(starts)) == {300} and row.is_causal
        assert (row.k_end == np.arange(8192) + 1).all()
    (row,) = run_on(directory, "missing", {}, mask="window(9)").rows
    assert row.window == 9 and (row.k_start == np.arange(-8, 8184).clip(0)).all()
    (row,) = run_on(directory, "missing", {}, mask="prefix(9)").rows
    assert not row.is_causal and row.k_end[:10].tolist() == [9] * 9 + [10]


@pytest.mark.parametrize(
    "attention, mesh, rows, is_counted", table("runs.txt", "rings")
)
def test_rings_of_short_documents_are_counted(
    directory, attention, mesh, rows, is_counted
):
    fields = {"attention": attention, "data__rows": rows, "data__context_tokens": 8192}
    for corpus in ("short", "long"):
        choice = run_on(directory, corpus, mesh, **fields).choice
        assert choice.count_steps == (is_counted and corpus == "short")


@pytest.mark.parametrize("corpus, fields, line", table("runs.txt", "advice"))
def test_a_run_says_which_layout_suits(directory, corpus, fields, line):
    said = layout_line(run_on(directory, corpus, {"ring": 8}, **fields))
    assert re.fullmatch(f"layout: {line}" if line else "", said), said
    assert layout_line(run_on(directory, corpus, {}, **fields)) == ""
