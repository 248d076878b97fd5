"""Faults that other rings had in silence: docs/what-breaks-elsewhere.md has them all.

A small model trains and validates as in a run, in every layout and ring, beside the
same written out in float64. Every fault that operands can have is put in, and found.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data.batch import Batch
from kernels import layouts, masks
from kernels.ring import attend as ring_attend
from kernels.ring import loop as ring_loop
from kernels.ring.attend import Ring
from models import losses
from tasks import programs
from tests.cases import in_tiers
from tests.support.hard_rows import (
    MOST,
    ROWS,
    VOCAB,
    HardRows,
    changed,
    reach,
    token_losses,
)
from tests.support.pages import ROOT
from tests.support.ring_model import RingModel
from training.sharding.mesh import MeshShape

LAYOUTS = "ring", "striped", "zigzag"
slow = pytest.mark.slow
MISMATCH = "Mismatched elements"


@pytest.fixture(scope="module", autouse=True)
def small_programs():
    """Compiles rings of more than 4 as loops; validations have parts by position."""
    loops = mock.patch.multiple(ring_loop, UNROLLED_STEPS=3, LOOP_UNROLL=1)
    with loops, mock.patch.object(losses, "FIRST_BOUND", 4):
        yield


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return HardRows(tmp_path_factory.mktemp("rows"))


# Every ring size in one layout, in turn; slow in the others.
RINGS = [
    pytest.param((ring, name), marks=[slow] if (ring - number) % 3 else [])
    for ring in range(1, 9)
    for number, name in enumerate(LAYOUTS)
]


@functools.cache
def model_on(ring: int, attention: str) -> RingModel:
    return RingModel(MeshShape(ring=ring), attention)


@pytest.fixture(scope="module", params=RINGS, ids=str)
def model(request: pytest.FixtureRequest) -> RingModel:
    return model_on(*request.param)


def batch_of(model: RingModel, rows: HardRows) -> Batch:
    return rows.read(model.length, model.layout, model.ring)


@pytest.mark.parametrize("granule", [1, 3])
@pytest.mark.parametrize("ring", range(1, 9))
def test_targets_and_positions_are_those_of_the_document_at_shard_ends(
    ring, granule, rows
):
    """In every slot of every layout; a label is lost nowhere, nor there twice."""
    for kind in layouts.Contiguous(), layouts.Zigzag(), layouts.Striped(granule):
        length = layouts.padded_length(kind, ring, 24)
        batch = rows.read(length, kind, ring)
        batch = Batch(*(layouts.unpermute(x, kind, ring) for x in batch))
        index = np.arange(length)
        for number, row in enumerate(ROWS.values()):
            tokens, targets, weights, positions, *bounds = (x[number] for x in batch)
            np.testing.assert_array_equal(tokens, number * MOST + index)
            predicted = row.predicted(length)
            np.testing.assert_array_equal(targets[predicted], tokens[predicted] + 1)
            np.testing.assert_array_equal(weights > 0, predicted)
            np.testing.assert_array_equal(positions, row.positions(length))
            k_start, k_end = (bound[:, None] for bound in bounds)
            seen = (k_start <= index) & (index < k_end)
            np.testing.assert_array_equal(seen, row.sees(length))


def losses_of(model: RingModel, batch: Batch, parameters: Any = None) -> np.ndarray:
    """Losses of all tokens in natural order: (rows of the batch, T).

    The program has as many rows as tokens that can change.
    """
    size = len(ROWS) * model.length
    filled = jax.tree.map(lambda x: np.resize(x, (size, model.length)), batch)
    found = model.token_losses(filled, parameters)
    assert np.isfinite(found).all()
    return found[: len(batch.tokens)]


def assert_moves_what_may_see_it(model: RingModel, batch: Batch) -> None:
    """Changes every token of every row, and compares the losses to the bit."""
    times = model.length
    batch = Batch(*(np.repeat(x, times, axis=0) for x in batch))
    after = changed(batch, np.tile(model.slots(), len(ROWS)))
    moved = losses_of(model, batch) != losses_of(model, after)
    moved = moved.reshape(len(ROWS), times, times)
    for (name, row), found in zip(ROWS.items(), moved, strict=True):
        wanted = reach(row, times, model.windows).T
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.thorough(quick=2)
def test_a_changed_token_moves_exactly_what_may_see_it(model, rows):
    """Through a layer with a window and one without, with sinks; all else stays."""
    assert_moves_what_may_see_it(model, batch_of(model, rows))


def truth(model: RingModel, rows: HardRows, parameters: Any = None) -> np.ndarray:
    """Losses of all tokens in natural order, written out in float64."""
    parameters = model.parameters if parameters is None else parameters
    return token_losses(model.sizes, parameters, rows.read(model.length))


def assert_written_out(model: RingModel, rows: HardRows, *given: Any) -> None:
    """given: batch and parameters."""
    found = losses_of(model, *given)
    np.testing.assert_allclose(found, truth(model, rows), rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(quick=2)
def test_the_loss_of_every_token_is_that_written_out(model, rows):
    assert_written_out(model, rows, batch_of(model, rows))


FAULTS = "leak", "no window", "next seen", "padding attends", "one shard"
FAULTS += "positions by shard", "no label at shard ends"


def faulty(model: RingModel, rows: HardRows, fault: str) -> Batch:
    """What other rings did to their operands, here in a ring of two."""
    index, half = np.arange(model.length), model.length // 2
    batch = rows.read(model.length)
    k_start, k_end, sees = batch.k_start, batch.k_end, batch.k_end > batch.k_start
    late = k_start.clip(half)
    fields = {
        "leak": {"k_start": np.where(sees, 0, k_start)},
        "no window": {"k_start": np.where(sees, index - batch.positions, k_start)},
        "next seen": {"k_end": k_end + sees},
        "padding attends": {
            "k_start": np.where(sees, k_start, 0),
            "k_end": np.where(sees, k_end, index + 1),
        },
        "one shard": {"k_start": np.where(index >= half, late, k_start)},
        "positions by shard": {"positions": batch.positions % half},
        "no label at shard ends": {
            "targets": np.where(index == half - 1, 0, batch.targets)
        },
    }
    batch = batch._replace(**fields[fault])
    return Batch(*(layouts.permute(x, model.layout, model.ring) for x in batch))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_operands_gives_other_losses(fault, rows):
    model = model_on(2, "zigzag")
    with pytest.raises(AssertionError, match=MISMATCH):
        assert_written_out(model, rows, faulty(model, rows, fault))


def test_dropped_sinks_give_other_losses(rows):
    model = model_on(2, "zigzag")
    without = jax.tree.map(np.array, model.parameters)
    without["layers"]["attention"]["sinks"][:] = -np.inf
    with pytest.raises(AssertionError, match=MISMATCH):
        assert_written_out(model, rows, batch_of(model, rows), without)


@pytest.fixture(
    scope="module",
    ids=str,
    params=in_tiers("runs.txt", "trains"),
)
def run(request: pytest.FixtureRequest) -> RingModel:
    """A model that validates and makes steps."""
    sizes, attention, microbatches = request.param
    return RingModel(MeshShape(**sizes), attention, train__microbatches=microbatches)


def mean_loss(losses: np.ndarray, batch: Batch) -> float:
    return float((losses * batch.loss_weights).sum() / batch.loss_weights.sum())


@pytest.mark.thorough
def test_evaluation_loss_is_the_training_loss(run, rows):
    """And the mean of all tokens, in float64, not that of the shards' means."""
    losses, batch = truth(run, rows), batch_of(run, rows)
    wanted = mean_loss(losses, rows.read(run.length))
    trained = float(run.step(batch)[1]["loss"])
    assert trained == pytest.approx(wanted, rel=1e-5), "training loss"
    assert run.evaluation(batch) == pytest.approx(wanted, rel=1e-5), "validation loss"
    by_slot = layouts.permute(losses, run.layout, run.ring)
    cut = functools.partial(np.split, indices_or_sections=max(2, run.ring), axis=1)
    shards = zip(cut(by_slot), cut(batch.loss_weights), strict=True)
    means = [(x * w).sum() / w.sum() for x, w in shards if w.any()]
    assert np.mean(means) != pytest.approx(wanted, rel=5e-4)


def assert_slopes(model: RingModel, rows: HardRows, rng: np.random.Generator) -> None:
    """Compares the gradient of each parameter with a slope of the loss written out."""
    gradients, metrics = model.step(batch_of(model, rows))
    norm = np.linalg.norm([np.linalg.norm(x) for x in jax.tree.leaves(gradients)])
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    leaves, tree = jax.tree.flatten(jax.device_get(model.parameters))
    batch, step = rows.read(model.length), 1e-5
    named = jax.tree_util.tree_leaves_with_path(gradients)
    for number, (path, gradient) in enumerate(named):
        along = rng.standard_normal(gradient.shape)

        def loss_after(steps, number=number, along=along):
            moved = [leaf.astype(np.float64) for leaf in leaves]
            moved[number] += steps * step * along
            return mean_loss(truth(model, rows, jax.tree.unflatten(tree, moved)), batch)

        slope = (loss_after(1) - loss_after(-1)) / (2 * step)
        error = abs(np.vdot(gradient, along) - slope) / np.linalg.norm(gradient)
        assert error < 1e-3, f"slope of {jax.tree_util.keystr(path)}"


@pytest.mark.thorough
def test_gradients_are_the_slopes_of_the_loss(run, rows, rng):
    assert_slopes(run, rows, rng)


@pytest.mark.thorough
def test_the_gradient_of_a_loss_reaches_exactly_what_it_sees(run, rows):
    """Of one token's loss in each row; every token has an embedding of its own."""
    batch, length = batch_of(run, rows), run.length
    wanted = [reach(row, length, run.windows) for row in ROWS.values()]
    for token, slot in enumerate(run.slots()):
        weights = np.zeros_like(batch.loss_weights)
        weights[:, slot] = 1
        gradients, _ = run.step(batch._replace(loss_weights=weights))
        found = gradients["embedding"].any(axis=1).reshape(len(ROWS), MOST)[:, :length]
        np.testing.assert_array_equal(found, [row[token] for row in wanted])


@pytest.mark.thorough
def test_nothing_of_a_step_is_left_in_the_next(run, rows):
    def another(batch, slots):
        return changed(batch, slots)._replace(targets=(batch.targets + 1) % VOCAB)

    batch, natural = batch_of(run, rows), rows.read(run.length)
    places = np.arange(len(ROWS))
    moved = jax.tree.map(lambda x: 1.5 * x, jax.device_get(run.parameters))
    given = (batch,), (another(batch, run.slots()[places]), moved), (batch,)
    wanted = token_losses(run.sizes, moved, another(natural, places))
    wanted = mean_loss(wanted, natural)
    first, between, again = (run.step(*each) for each in given)
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert float(between[1]["loss"]) == pytest.approx(wanted, rel=1e-5)
    assert float(first[1]["loss"]) != pytest.approx(wanted, rel=1e-2)
    first, between, again = (run.evaluation(*each) for each in given)
    assert between == pytest.approx(wanted, rel=1e-5) and first == again != between


# Faults of the ring itself, of which each is found.


def attend_to_own_shards(patch: pytest.MonkeyPatch) -> None:
    """Nothing travels."""
    patch.setattr(Ring, "shift", lambda ring, arrays, *_: arrays)


def count_the_wrong_shard(patch: pytest.MonkeyPatch) -> None:
    """Intervals are those of the shard before."""
    slots = Ring.slots
    patch.setattr(Ring, "slots", lambda ring, d, *of: slots(ring, (d + 1) % 3, *of))


def drop_windows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(masks, "window", lambda size: masks.causal())


def count_sinks_twice(patch: pytest.MonkeyPatch) -> None:
    merge = ring_attend.merge
    patch.setattr(ring_attend, "merge", lambda sink, all: merge(sink, merge(sink, all)))


def give_nan_to_rows_that_see_nothing(patch: pytest.MonkeyPatch) -> None:
    run = ring_attend.ForwardPass.run

    def faulty(this: ring_attend.ForwardPass) -> tuple:
        out, lse = run(this)
        is_empty = jnp.isneginf(lse).swapaxes(1, 2)[..., None]
        return jnp.where(is_empty, jnp.nan, out), lse

    patch.setattr(ring_attend.ForwardPass, "run", faulty)


def patch_backward(patch: pytest.MonkeyPatch, faulty: Callable) -> None:
    """faulty: from a backend's backward, and keys and values of the first ring step."""
    prepare = ring_attend.BackwardPass.prepare

    def prepare_faulty(this: Ring, rows: tuple, kv: tuple, visible: Any) -> Any:
        backend = SimpleNamespace(backward=faulty(this.backend.backward, kv))
        return prepare(dataclasses.replace(this, backend=backend), rows, kv, visible)

    patch.setattr(ring_attend.BackwardPass, "prepare", prepare_faulty)


def read_stale_keys_backward(patch: pytest.MonkeyPatch) -> None:
    """Those of the first ring step."""
    patch_backward(patch, lambda own, kv: lambda q, k, v, *x, **y: own(q, *kv, *x, **y))


def forget_gradients_of_other_shards(patch: pytest.MonkeyPatch) -> None:
    """Keys get those of the last ring steps only."""
    patch_backward(patch, lambda own, _: lambda *x, **y: own(*x, **y | {"dkv": None}))


def add_up_validations_of_copies(patch: pytest.MonkeyPatch) -> None:
    """One of each device in the ring."""
    make = programs.make_evaluate_step

    def faulty(loss_sum: Callable, count: Callable) -> Callable:
        return make(lambda *given: 3 * loss_sum(*given), count)

    patch.setattr(programs, "make_evaluate_step", faulty)


@slow
@pytest.mark.parametrize(
    "fault, attention, look, error",
    [
        (attend_to_own_shards, "zigzag", "moves", MISMATCH),
        (count_the_wrong_shard, "zigzag", "losses", MISMATCH),
        (drop_windows, "zigzag", "losses", MISMATCH),
        (count_sinks_twice, "zigzag", "losses", MISMATCH),
        (give_nan_to_rows_that_see_nothing, "striped", "losses", "isfinite"),
        (read_stale_keys_backward, "zigzag", "slopes", "slope of"),
        (forget_gradients_of_other_shards, "zigzag", "slopes", "slope of"),
        (add_up_validations_of_copies, "zigzag", "means", "validation loss"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_of_the_ring_is_found(
    fault, attention, look, error, tmp_path, rng, monkeypatch
):
    fault(monkeypatch)
    rows, model = HardRows(tmp_path), RingModel(MeshShape(ring=3), attention)
    batch = batch_of(model, rows)
    looks: dict[str, Callable[[], None]] = {
        "moves": lambda: assert_moves_what_may_see_it(model, batch),
        "losses": lambda: assert_written_out(model, rows, batch),
        "slopes": lambda: assert_slopes(model, rows, rng),
        "means": lambda: test_evaluation_loss_is_the_training_loss(model, rows),
    }
    if look == "slopes":  # the loss is right
        looks["losses"]()
    with pytest.raises(AssertionError, match=error):
        looks[look]()


def test_the_page_names_tests_that_there_are():
    text = (ROOT / "docs/what-breaks-elsewhere.md").read_text()
    named = re.findall(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`", text)
    for file, name in named:
        source = ROOT / file if file else Path(__file__)
        assert f"def {name}(" in source.read_text(), name
    assert len(named) >= 25
