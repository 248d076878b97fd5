"""Models with Gated DeltaNet: packed documents, long rows, operations, and faults."""

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from data.batch import Batch
from kernels.layouts import permute
from models.flops import train_flops
from tasks.layout_choice import state_times, states_of
from tests.cases import pairs
from tests.small.models import LENGTH, Run, assert_same, rows, run_on
from training.sharding.mesh import MeshShape

FAMILY = "qwen3_5"


def of(run: Run, batch: Batch) -> tuple[Any, Any]:
    """Loss and gradients of a batch in natural order."""
    ordered = Batch(*(permute(x, *run.order()) for x in batch))
    step = jax.jit(jax.value_and_grad(run.loss))
    return jax.device_get(step(run.parameters, ordered))


def alone(batch: Batch) -> Batch:
    """Each document in a row of its own, behind it padding."""
    found = []
    for row in zip(*batch, strict=True):
        row = Batch(*row)
        firsts = np.flatnonzero((row.positions == 0) & (row.k_end > row.k_start))
        for start, end in zip(firsts, [*firsts[1:], LENGTH], strict=True):
            shifted = row._replace(
                k_start=(row.k_start - start).clip(0), k_end=(row.k_end - start).clip(0)
            )
            cut = (x[start:end] for x in shifted)
            found.append([np.pad(x, (0, LENGTH - len(x))) for x in cut])
    return Batch(*map(np.stack, zip(*found, strict=True)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape, attention, fields",
    [
        (MeshShape(ring=4), "zigzag", {}),
        (MeshShape(fsdp=2, ring=2, tensor=2), "striped", {"stripe_granule": 4}),
        pytest.param(
            *(MeshShape(ring=2, ulysses=2), "zigzag", {"remat": "nothing"}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_packed_documents_are_those_alone(shape, attention, fields):
    """On a ring and on one device: the loss, and all gradients."""
    separate = alone(rows())
    assert len(separate.tokens) > len(rows().tokens)
    wanted = of(run_on(MeshShape(), "vanilla", FAMILY), separate)
    got = of(Run(shape, attention, FAMILY, **fields), rows())
    assert_same(got, wanted, 1e-5)


@pytest.mark.slow
def test_a_long_row_on_a_ring_is_that_on_one_device():
    """64 Ki tokens, two documents; attention has windows."""
    tokens = 1 << 16
    fields = {
        "implementation": "blockwise",
        "model__layer_pattern": "dddw",
        "model__window": 64,
        "data__context_tokens": tokens,
        "data__batch_rows": 1,
        "feed_forward_chunk_tokens": 4096,
        "loss_chunk_tokens": 4096,
    }
    rng, index = np.random.default_rng(3), np.arange(tokens, dtype=np.int32)[None]
    start = np.where(index < 9999, 0, 9999).astype(np.int32)
    ids, targets = rng.integers(0, 40, (2, 1, tokens), np.int32)
    weights = np.full((1, tokens), 1 / tokens, np.float32)
    batch = Batch(ids, targets, weights, index - start, start, index + 1)
    wanted = of(Run(MeshShape(), "memory_efficient", FAMILY, **fields), batch)
    got = of(Run(MeshShape(ring=8), "zigzag", FAMILY, **fields), batch)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    assert_same(got[1], wanted[1], 1e-4)


def test_operations_are_counted():
    run = run_on(MeshShape(), "vanilla", FAMILY)
    sizes = run.model.config
    tokens, heads, keys, values, width = 7, 4, 6, 5, 4
    matrices = [
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(run.model.shapes)
        if not re.search("norm|kernel|log_rate|bias|embedding", str(path))
    ]
    # A state decays, is read twice and written, 2 a product and sum but for decay.
    mixing = heads * keys * values * (2 + 2 + 2) + 2 * width * (2 * 2 * keys + 20)
    delta = 3 * tokens * len(sizes.numbers("delta_layers")) * mixing
    pair = 3 * 4 * sizes.num_heads * sizes.head_dim
    wanted = 6 * tokens * sum(matrices) + delta + 9 * pair
    assert train_flops(sizes, tokens, 9) == wanted


@pytest.mark.parametrize(
    "remat, forwards, passes",
    [("everything", 1, 2), ("attention", 2, 2), ("nothing", 2, 3)],
)
def test_states_are_sent_again_only_where_nothing_is_kept(remat, forwards, passes):
    """The rule runs again if anything is recomputed."""
    fields = {"remat": remat, "train__microbatches": 2}
    run = run_on(MeshShape(ring=2), "zigzag", FAMILY, **fields).resolved
    states = states_of(run)
    forward, backward = states.computing(run.chip)
    sent = states.sending(run.chip)
    layers = 2 * len(run.sizes.numbers("delta_layers"))
    wanted = layers * (forwards * forward + backward), layers * passes * sent
    assert state_times(run, run.chip) == pytest.approx(wanted) and sent > 0


@pytest.mark.parametrize(("changes", "said"), pairs("models.txt", "hybrid"))
def test_what_no_hybrid_has_is_refused(changes, said):
    sizes = run_on(MeshShape(), "vanilla", FAMILY).model.config
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(sizes, **eval(changes))


def test_stripes_of_one_token_are_refused_before_anything_is_compiled():
    run = Run(MeshShape(ring=4), "striped", FAMILY).resolved
    said = r"runs of 1 tokens .* reads 3 before a token: set attention=zigzag or ring"
    with pytest.raises(ValueError, match=said):
        run.check_batch()
    auto = Run(MeshShape(ring=4), "auto", FAMILY).resolved
    assert auto.layout != run.layout


@pytest.mark.parametrize("fields", [{"name": "muon"}, {"moments": "float8"}], ids=str)
def test_optimizers_that_go_through_one_stack_of_layers_are_refused(fields):
    fields = {f"optimizer__{name}": value for name, value in fields.items()}
    run = Run(MeshShape(), "vanilla", FAMILY, **fields).resolved
    with pytest.raises(ValueError, match="has a second, delta_layers: set .*adamw"):
        _ = run.optimizer
