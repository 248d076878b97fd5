"""Rows assigned to steps by their work: which rows, and that rings wait less."""

import numpy as np
import pytest

from data.balance import Balanced, folded
from data.mixture import MixedOrder, MixedRows
from data.rows import InOrder, PackedRows, Shuffled
from tasks import corpora
from tests.small.corpora import make_corpus
from tests.small.runs import small_config

BATCH, STEPS, WINDOWS = 8, 5, 8
WINDOW = BATCH * STEPS
COUNT = WINDOWS * WINDOW
"""Rows that are read: less than an epoch."""


@pytest.fixture
def plans(tmp_path, rng):
    """Two corpora, of documents of a token to some rows."""
    found = []
    for name in "ab":
        (tmp_path / name).mkdir()
        lengths = rng.lognormal(2, 1.2, 1000).astype(int) + 1
        found.append(PackedRows(make_corpus(tmp_path / name, lengths), 32))
    return found


@pytest.fixture(params=["one", "mixed"])
def ordered(plans, request):
    """A plan, the order of its rows as drawn, and an order by work."""
    plan, drawn = plans[0], Shuffled(3)
    if request.param == "mixed":
        plan, counts = MixedRows(plans), [each.rows for each in plans]
        drawn = MixedOrder(counts, (0.7, 0.3), drawn)
    return plan, drawn, Balanced(drawn, plan.work, BATCH, STEPS)


def read(plan, order, count=COUNT):
    """The first rows that the order reads."""
    sequence = order.sequence(plan.rows)
    return np.array([sequence[place] for place in range(count)])


def test_windows_have_the_rows_as_drawn_and_steps_have_neighbours_by_work(ordered):
    plan, *orders = ordered
    drawn, assigned = (read(plan, each).reshape(WINDOWS, WINDOW) for each in orders)
    np.testing.assert_array_equal(np.sort(assigned), np.sort(drawn))
    turns = set()
    for rows in assigned:
        work = np.array([plan.work(row) for row in rows]).reshape(STEPS, BATCH)
        turn = np.argsort(work.sum(axis=1))
        assert (work.max(axis=1)[turn][:-1] <= work.min(axis=1)[turn][1:]).all()
        turns.add(tuple(turn))
        ends = np.stack([work.max(axis=1), work.min(axis=1)], axis=1)
        np.testing.assert_array_equal(work[:, :2], ends)  # heavy beside light
    assert len(turns) > 2  # steps come by chance, not by their work


@pytest.mark.parametrize("rings", [2, 4, 8])
def test_rings_beside_each_other_wait_less_than_half(ordered, rings):
    plan, *orders = ordered
    waits = []
    for order in orders:
        work = np.array([plan.work(row) for row in read(plan, order)])
        work = work.reshape(-1, rings, BATCH // rings).sum(axis=2)
        waits.append(work.max(axis=1).sum() / work.mean(axis=1).sum() - 1)
    assert waits[1] < waits[0] / 2


def test_an_order_with_an_end_has_every_row_once_and_the_rest_last(plans):
    plan, batch = plans[0], plans[0].rows // 3 - 1
    found = read(plan, Balanced(InOrder(), plan.work, batch, 9), count=plan.rows)
    assert sorted(found) == [*range(plan.rows)] != [*found]
    assert found[3 * batch :].tolist() == [*range(3 * batch, plan.rows)] != []


def test_a_window_of_epochs_reads_no_row_twice_in_a_step(tmp_path):
    plan = PackedRows(make_corpus(tmp_path, [90, 1, 41, 30, 60]), 20)  # 11 rows
    found = read(plan, Balanced(Shuffled(3), plan.work, 4, 11), count=4 * 11)
    assert np.bincount(found).tolist() == [4] * 11
    assert all(len({*step}) == 4 for step in found.reshape(11, 4))


@pytest.mark.parametrize("count, parts", [(5, 1), (6, 3), (8, 4), (8, 2), (12, 3)])
def test_parts_of_a_fold_have_equal_sums(count, parts):
    found = np.array(folded(count))
    assert sorted(found) == [*range(count)]
    assert len({*found.reshape(parts, -1).sum(axis=1)}) == 1


def test_a_config_deals_rows_to_train_on_and_draws_others_as_ever(corpus, tmp_path):
    def of(split, steps):
        config = small_config(corpus, tmp_path, data__balanced_steps=steps)
        plan, order = corpora.rows(config, split, 1 << 16)
        count = min(len(order.sequence(plan.rows)), 8 * config.data.batch_rows)
        return plan, read(plan, order, count=count).tolist(), count, config.seed

    plan, drawn, count, seed = of("train", 0)
    assert drawn == read(plan, Shuffled(seed), count=count).tolist()
    assert sorted(of("train", 8)[1]) == sorted(drawn) != of("train", 8)[1]
    held_out = of("validation", 8)
    assert held_out[1] == [*range(held_out[2])]
