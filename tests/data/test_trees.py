"""Texts that begin alike as trees: their losses, in rows and on disk."""

from collections import Counter

import numpy as np
import pytest

from data.document_mask import DocumentMask
from data.row_trees import RowTrees
from data.rows import WholeRows
from data.text.tokens import prefix_tree
from data.text.tokens.prefix_tree import Document, are_parts, join, join_within
from data.text.tokens.token_file import TokenFile, TokenFileWriter
from kernels.cost.work import Row, RowOnRing
from kernels.layouts import Contiguous, Striped, Zigzag
from kernels.trees import tree
from tasks.layout_choice import typical_rows
from tests.cases import table
from tests.small.corpora import NUMBERS, read_rows
from tests.small.runs import small_config

KINDS = {"mask": (bool, [0, 1]), "weights": (np.float32, [0, 0.25, 1, 1.5])}


def drawn_texts(rng, kind="weights", longest=9):
    """Texts of two letters, which often begin alike."""
    dtype, weights = KINDS[kind]
    sizes = rng.integers(1, longest, rng.integers(1, 16))
    return [
        Document(
            rng.integers(1, 3, size, np.int32), rng.choice(weights, size).astype(dtype)
        )
        for size in sizes
    ]


def losses(texts):
    """Weights by what a token sees, itself last, and its target."""
    found = Counter()
    for text in texts:
        tokens = text.tokens.tolist()
        for place, weight in enumerate(text.weights[1:].tolist(), 1):
            found[tuple(tokens[:place]), tokens[place]] += weight
    return +found


def losses_of(row):
    """The same of a row, of which each token sees some intervals."""
    found = Counter()
    for i in np.flatnonzero(row.loss_weights):
        bounds = sorted(
            zip(row.k_start[i].tolist(), row.k_end[i].tolist(), strict=True)
        )
        seen = [index for begin, end in bounds for index in range(begin, end)]
        assert len({*seen}) == len(seen) == row.positions[i] + 1 and seen[-1] == i
        assert row.positions[seen].tolist() == [*range(len(seen))]
        found[tuple(row.tokens[seen].tolist()), int(row.targets[i])] += float(
            row.loss_weights[i]
        )
    return found


def text(words):
    tokens = np.array([*map(ord, words)], np.int32)
    return Document(tokens, np.ones(tokens.size, bool))


@pytest.fixture
def shares_all(monkeypatch):
    monkeypatch.setattr(prefix_tree, "LEAST_SHARED", 0)


@pytest.mark.parametrize("least", [0, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_trees_have_the_losses_of_their_texts(
    tmp_path, kind, least, rng, monkeypatch
):
    monkeypatch.setattr(prefix_tree, "LEAST_SHARED", least)
    groups = [drawn_texts(rng, kind) for _ in range(60)]
    # Two that begin alike for longer than any `least`: not every draw has some.
    dtype = KINDS[kind][0]
    shared = [1, 2, 1, 2, 1, 2]
    groups.append(
        [
            Document(np.array([*shared, last], np.int32), np.ones(7, dtype))
            for last in (1, 2)
        ]
    )
    documents = [tree for texts in groups for tree in join_within(texts, 80)]
    with TokenFileWriter(tmp_path / "c", NUMBERS, has_loss_mask=True) as writer:
        writer.has_weights = any(d.weights.dtype != bool for d in documents)
        for document in documents:
            writer.write("train", *document)
    corpus = TokenFile.open(tmp_path / "c", "train")
    assert corpus.intervals == max(d.intervals for d in documents) > 1
    plan = WholeRows(corpus, 90, DocumentMask(), corpus.intervals)
    rows = read_rows(plan)
    assert sum((losses_of(row) for row in rows), Counter()) == sum(
        map(losses, groups), Counter()
    )
    for number, row in enumerate(rows):
        assert all((np.diff(bound, axis=0) >= 0).all() for bound in row[-2:])
        seen = (row.k_end - row.k_start).clip(0).sum(axis=1)
        assert plan.work(number) == seen.sum() == (row.positions + 1)[seen > 0].sum()
        np.testing.assert_array_equal(seen[row.tokens == 0], 0)
        some = rng.permutation(90)[:9].astype(np.int32)
        for part, whole in zip(plan.read(number, some), row, strict=True):
            np.testing.assert_array_equal(part, whole[some])


def test_trees_have_as_few_tokens_and_intervals_as_they_need(rng, shares_all):
    """A token for all that see the same and have the same target; see `tree`."""
    most = Counter()
    for _ in range(300):
        texts = drawn_texts(rng, longest=12)
        documents = join(texts)
        follow = {}
        for one in texts:
            tokens = tuple(one.tokens.tolist())
            for end in range(1, len(tokens) + 1):
                follow.setdefault(tokens[:end], set()).update(tokens[end : end + 1])
        size = sum(document.tokens.size for document in documents)
        assert size == sum(max(1, len(targets)) for targets in follow.values())
        for document in documents:
            assert (document.segments is None) == (document.intervals == 1)
            if document.segments is None:
                continue
            parts = RowTrees.of(document.segments, 0, document.tokens.size)
            ids = np.repeat(np.arange(parts.parents.size), parts.sizes)
            visible = tree(ids, parts.parents)(np.arange(ids.size), ids.size)
            needed = len(visible.intervals().k_start)
            assert needed == document.intervals
            most[needed] += 1
    assert {*most} >= {2, 3}


@pytest.mark.parametrize("texts, tokens, weights, segments", table("data.txt", "tree"))
def test_answers_are_branches_of_their_prompt(
    texts, tokens, weights, segments, shares_all
):
    (document,) = join([*map(text, texts)])
    assert "".join(map(chr, document.tokens)) == tokens
    assert "".join(f"{weight:.0f}" for weight in document.weights) == weights
    np.testing.assert_array_equal(document.segments, segments)


@pytest.mark.parametrize(
    "least, sizes, intervals",
    [(0, [16], 3), (2, [17], 2), (6, [17], 2), (7, [11, 9, 9], 2), (8, [9] * 4, 1)],
)
def test_answers_that_begin_alike_by_chance_add_no_interval(
    monkeypatch, least, sizes, intervals
):
    monkeypatch.setattr(prefix_tree, "LEAST_SHARED", least)
    documents = join([*map(text, ["Prompt:xa", "Prompt:xb", "Prompt:yc", "Prompt:yd"])])
    assert [document.tokens.size for document in documents] == sizes
    assert max(document.intervals for document in documents) == intervals


def test_documents_and_groups_fill_a_row():
    trees = RowTrees.repeated(("10+3x4", 6), 60)
    ends = [0, 10, 14, 18, 22, 28, 38, 42, 46, 50, 56, 60]
    assert trees.bounds.tolist() == [*ends, *[60] * 3]
    assert trees.parents.tolist() == [-1, 0, 0, 0, -1, -1, 5, 5, 5, -1, -1, 10, 10, 10]
    assert trees.depths.tolist() == [0, 10, 10, 10, 0, 0, 10, 10, 10, 0, 0, 4, 4, 4]
    assert np.flatnonzero(trees.goes_on).tolist() == [0, 5, 10]
    config = small_config("", "", data__context_tokens=60, attention="vanilla")
    (row,) = typical_rows(config, ("10+3x4", 6))
    assert row.intervals == 2 and row.pairs == trees.pairs


@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Zigzag()])
def test_a_ring_s_work_is_that_of_all_intervals(layout):
    bounds = RowTrees.repeated(("700+3x500",), 4096).visible(np.arange(4096), 2)
    row = Row(*(bound.T for bound in bounds))
    alone = [Row(*pair) for pair in zip(row.k_start, row.k_end, strict=True)]
    whole, *parts = (RowOnRing(x, layout, 4, 1024).work() for x in (row, *alone))
    for name in "pairs", "partial":
        total = sum(getattr(part, name) for part in parts)
        np.testing.assert_array_equal(getattr(whole, name), total)
    assert {1, 2} >= {*whole.rows.ravel().tolist()} >= {2}


@pytest.mark.parametrize(
    "segments", [rows for (rows,) in table("data.txt", "no-parts")]
)
def test_segments_that_are_no_parts_of_documents_are_refused(segments):
    offsets = np.array([0, 4, 9])
    assert are_parts(np.array([[0, 0], [4, 0], [6, 1], [7, 2]]), offsets)
    assert not are_parts(np.array(segments, np.int64).reshape(-1, 2), offsets)
