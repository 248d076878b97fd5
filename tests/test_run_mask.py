"""The mask of a run and its model's windows: what a step counts, and what it reads."""

import itertools

import numpy as np
import pytest

from data.batch import Batch
from kernels.layouts import permute
from tasks import base, text
from tests.runs import small_config
from tests.small_llama import partition_of
from training.mesh import MeshShape

MASKS = ["causal", "window(7)", "prefix(9)"]
PATTERNS = {"": 2, "w": 2, "wwf": 4, "wf": 3}
"""Layers by pattern; some are left over."""


def whole_batch(blocks: dict) -> Batch:
    (batch,) = blocks.values()
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


@pytest.mark.parametrize("rows", ["packed", "documents"])
@pytest.mark.parametrize("mask", MASKS)
def test_tokens_and_pairs_are_those_counted_one_by_one(corpus, mask, rows):
    fields = {"mask": mask, "data__rows": rows, "data__context_tokens": 400}
    found = set()
    for pattern, layers in PATTERNS.items():
        parts = {
            "model__layer_pattern": pattern,
            "model__num_layers": layers,
            "model__window": 5 if "w" in pattern else 0,
        }
        if mask.startswith("prefix") and pattern == "w":
            continue
        config = small_config(corpus, "", attention="vanilla", **fields | parts)
        task = text.make(config, partition_of(MeshShape()))
        batches = text.batches(config, partition_of(MeshShape()), "train")
        held_out = text.batches(config, partition_of(MeshShape()), "validation")
        objectives = task.objective, task.held_out
        for read, objective in zip((batches, held_out), objectives, strict=True):
            batch = whole_batch(read[0])
            starts = (batch.positions == 0) & (batch.k_end > batch.k_start)
            assert starts.sum() > len(starts) or rows == "documents"
            windows = [kind.window for kind in task.model.config.layer_kinds]
            tokens, pairs = brute_force(batch, mask, windows)
            assert windows.count(5) == (pattern * layers)[:layers].count("w")
            got = objective.count(batch)
            assert float(got.tokens) == tokens
            assert float(got.pairs) == pytest.approx(pairs, rel=1e-6)
            assert got.weights.sum() == batch.loss_weights.sum() > 0
            found.add(float(got.pairs))
            for attention in ("ring", "striped", "zigzag"):
                config.attention = attention
                layout = base.attention_system(config).layout
                moved = Batch(*(permute(x, layout, 4) for x in batch))
                assert objective.count(moved).pairs == pytest.approx(pairs, rel=1e-6)
    assert len(found) >= 6


@pytest.mark.parametrize("attention", ["ring", "striped", "zigzag"])
def test_rows_of_every_layout_have_the_runs_mask(corpus, attention):
    """In both splits, as on one device."""
    for mask, split in itertools.product(MASKS[1:], ("train", "validation")):
        config = small_config(corpus, "", attention="vanilla", mask=mask)
        plain = whole_batch(text.batches(config, partition_of(MeshShape()), split)[0])
        config.attention = attention
        partition = partition_of(MeshShape(ring=4))
        layout = base.attention_system(config).layout
        blocks = text.batches(config, partition, split)[0]
        for block, batch in blocks.items():
            for name, part in batch._asdict().items():
                whole = permute(getattr(plain, name), layout, 4)
                wanted = whole[slice(*block.rows), slice(*block.columns)]
                np.testing.assert_array_equal(part, wanted, err_msg=name)
