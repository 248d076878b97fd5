"""Faults put into the ring itself: tests/test_what_breaks_elsewhere.py finds each."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from kernels import masks
from kernels.ring import attend as ring
from kernels.ring import backward as ring_backward
from kernels.ring.attend import Ring
from tasks import programs
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


@dataclasses.dataclass(frozen=True)
class Stale:
    """A backend whose backward reads these keys and values, whatever it is given."""

    backend: Any
    kv: tuple

    def backward(self, q: Any, k: Any, v: Any, *others: Any, **options: Any) -> Any:
        return self.backend.backward(q, *self.kv, *others, **options)


def read_stale_keys_backward(patch: pytest.MonkeyPatch) -> None:
    """Those of the first ring step."""
    backward = ring.backward

    def faulty(this: Ring, rows: tuple, kv: tuple, visible: Any) -> tuple:
        stale = dataclasses.replace(this, backend=Stale(this.backend, kv))
        return backward(stale, rows, kv, visible)

    patch.setattr(ring, "backward", faulty)


def keep_gradients_where_they_are_computed(patch: pytest.MonkeyPatch) -> None:
    """Those of keys do not follow them."""
    patch.setattr(ring_backward, "_followed", lambda *_: {})


FORWARD = attend_to_own_shards, count_the_wrong_shard, drop_windows
LOSSES = *FORWARD, count_sinks_twice
BACKWARD = read_stale_keys_backward, keep_gradients_where_they_are_computed


def name_of(fault: Patch) -> str:
    return fault.__name__


@pytest.fixture
def rows(tmp_path):
    return HardRows(tmp_path)


@pytest.mark.parametrize("fault", FORWARD, ids=name_of)
def test_a_changed_token_moves_others(fault, rows, monkeypatch):
    fault(monkeypatch)
    model = RingModel(MeshShape(ring=3), "zigzag")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_moves_what_may_see_it(model, batch_of(model, rows))


@pytest.mark.parametrize("fault", LOSSES, ids=name_of)
def test_losses_are_others(fault, rows, monkeypatch):
    fault(monkeypatch)
    model = RingModel(MeshShape(ring=3), "zigzag")
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_written_out(model, rows, batch_of(model, rows))


def test_padding_is_not_finite(rows, monkeypatch):
    give_nan_to_rows_that_see_nothing(monkeypatch)
    model = RingModel(MeshShape(ring=3), "striped")
    with pytest.raises(AssertionError, match="isfinite"):
        assert_written_out(model, rows, batch_of(model, rows))


@pytest.mark.parametrize("fault", BACKWARD, ids=name_of)
def test_gradients_are_not_the_slopes_though_the_loss_is_right(
    fault, rows, rng, monkeypatch
):
    fault(monkeypatch)
    model = RingModel(MeshShape(ring=3), "zigzag")
    assert_written_out(model, rows, batch_of(model, rows))
    with pytest.raises(AssertionError, match="slope of"):
        assert_slopes(model, rows, rng)


def test_validations_that_add_up_copies_are_not_the_training_loss(rows, monkeypatch):
    """One of each device in the ring."""
    make = programs.make_evaluate_step

    def faulty(loss_sum: Callable, count: Callable) -> Callable:
        return make(lambda *given: 3 * loss_sum(*given), count)

    monkeypatch.setattr(programs, "make_evaluate_step", faulty)
    model = RingModel(MeshShape(ring=3), "zigzag")
    wanted = mean_loss(truth(model, rows), rows.read(model.length))
    with pytest.raises(AssertionError, match="validation loss"):
        assert_means(model, rows, wanted)
