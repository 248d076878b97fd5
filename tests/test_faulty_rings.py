"""Faults put into the ring itself: tests/test_what_breaks_elsewhere.py finds each."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from kernels import masks
from kernels.ring import attend as ring
from kernels.ring.attend import Ring
from tasks import state
from tests.hard_rows import HardRows
from tests.ring_model import RingModel
from tests.test_what_breaks_elsewhere import (
    assert_means,
    assert_moves_what_may_see_it,
    assert_slopes,
    assert_written_out,
    batch_of,
    mean_loss,
    truth,
)
from training.mesh import MeshShape

pytestmark = pytest.mark.slow
Patch = Callable[[pytest.MonkeyPatch], None]


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
    merge = ring.merge
    patch.setattr(ring, "merge", lambda sink, all: merge(sink, merge(sink, all)))


def give_nan_to_rows_that_see_nothing(patch: pytest.MonkeyPatch) -> None:
    attend = ring._attend_rows

    def faulty(*arguments: Any) -> tuple:
        out, lse = attend(*arguments)
        is_empty = jnp.isneginf(lse).swapaxes(1, 2)[..., None]
        return jnp.where(is_empty, jnp.nan, out), lse

    patch.setattr(ring, "_attend_rows", faulty)


def patch_backward(patch: pytest.MonkeyPatch, faulty: Callable) -> None:
    """faulty: from a backend's backward, and keys and values of the first ring step."""
    backward = ring.backward

    def run(this: Ring, rows: tuple, kv: tuple, visible: Any) -> tuple:
        backend = SimpleNamespace(backward=faulty(this.backend.backward, kv))
        return backward(dataclasses.replace(this, backend=backend), rows, kv, visible)

    patch.setattr(ring, "backward", run)


def read_stale_keys_backward(patch: pytest.MonkeyPatch) -> None:
    """Those of the first ring step."""
    patch_backward(patch, lambda own, kv: lambda q, k, v, *x, **y: own(q, *kv, *x, **y))


def forget_gradients_of_other_shards(patch: pytest.MonkeyPatch) -> None:
    """Keys get those of the last ring steps only."""
    patch_backward(patch, lambda own, _: lambda *x, **y: own(*x, **y | {"dkv": None}))


def add_up_validations_of_copies(patch: pytest.MonkeyPatch) -> None:
    """One of each device in the ring."""
    make = state.make_evaluate_step

    def faulty(loss_sum: Callable, count: Callable) -> Callable:
        return make(lambda *given: 3 * loss_sum(*given), count)

    patch.setattr(state, "make_evaluate_step", faulty)


def moves(model: RingModel, rows: HardRows, _: Any) -> None:
    assert_moves_what_may_see_it(model, batch_of(model, rows))


def losses(model: RingModel, rows: HardRows, _: Any) -> None:
    assert_written_out(model, rows, batch_of(model, rows))


def means(model: RingModel, rows: HardRows, _: Any) -> None:
    assert_means(model, rows, mean_loss(truth(model, rows), rows.read(model.length)))


MISMATCH = "Mismatched elements"


@pytest.mark.parametrize(
    "fault, attention, look, error",
    [
        (attend_to_own_shards, "zigzag", moves, MISMATCH),
        (count_the_wrong_shard, "zigzag", losses, MISMATCH),
        (drop_windows, "zigzag", losses, MISMATCH),
        (count_sinks_twice, "zigzag", losses, MISMATCH),
        (give_nan_to_rows_that_see_nothing, "striped", losses, "isfinite"),
        (read_stale_keys_backward, "zigzag", assert_slopes, "slope of"),
        (forget_gradients_of_other_shards, "zigzag", assert_slopes, "slope of"),
        (add_up_validations_of_copies, "zigzag", means, "validation loss"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_of_the_ring_is_found(
    fault, attention, look, error, tmp_path, rng, monkeypatch
):
    fault(monkeypatch)
    rows, model = HardRows(tmp_path), RingModel(MeshShape(ring=3), attention)
    if look is assert_slopes:  # the loss is right
        losses(model, rows, rng)
    with pytest.raises(AssertionError, match=error):
        look(model, rows, rng)
