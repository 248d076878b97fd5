"""Trees of segments, and other masks of several intervals, as boolean matrices."""

import jax
import numpy as np
import pytest

from kernels import masks
from kernels.trees import tree
from tests.cases import table
from tests.cases.unions import UNIONS, drawn_tree, shown, shown_in_tree
from tests.kernels.test_masks import matrix


@pytest.mark.parametrize("tokens", [1, 31, 64, 257])
@pytest.mark.parametrize("name", UNIONS)
def test_unions_show_each_key_of_their_definition_once(name, tokens):
    padded = tokens + 7
    visible = UNIONS[name](tokens, padded)(np.arange(tokens, dtype=np.int32), tokens)
    assert all((np.diff(bound) >= 0).all() for bound in visible)
    np.testing.assert_array_equal(matrix(visible, tokens)[0], shown(name, tokens))


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
def test_drawn_trees_take_no_more_intervals_than_they_have_levels(levels, rng):
    """In rows of a batch, each with a tree of its own; and in any other order."""
    for _ in range(50):
        pairs = [drawn_tree(rng, 60, levels=levels) for _ in range(2)]
        ids, parents = map(np.stack, zip(*pairs, strict=True))
        visible = tree(ids, parents)(np.arange(60, dtype=np.int32), 60)
        assert len(visible.intervals().k_start) <= levels
        for row, pair in zip(matrix(visible, 60), pairs, strict=True):
            np.testing.assert_array_equal(row, shown_in_tree(*pair))
        parents = (rng.random(12) * (np.arange(12) + 1)).astype(int) - 1
        visible = tree(ids[0], parents)(np.arange(60, dtype=np.int32), 60)
        assert all((np.diff(bound) >= 0).all() for bound in visible)
        want = shown_in_tree(ids[0], parents)
        np.testing.assert_array_equal(matrix(visible, 60)[0], want)


@pytest.mark.parametrize("parents, most", table("kernels.txt", "tree"), ids=str)
def test_trees_take_few_intervals(parents, most):
    ids = np.repeat(np.arange(6), 3)
    index = np.arange(18, dtype=np.int32)
    visible = tree(ids, parents)(index, 18)
    assert len(visible.intervals().k_start) == most
    more = tree(ids, parents, intervals=most + 1)(index, 18)
    np.testing.assert_array_equal(matrix(more, 18), matrix(visible, 18))
    assert len(more.k_start) == most + 1
    assert (more.k_start[-1] >= more.k_end[-1]).all()
    if most > 1:
        with pytest.raises(ValueError, match=f"must be at least {most} here"):
            tree(ids, parents, intervals=most - 1)


IDS = [0, 0, 1, 2]


@pytest.mark.parametrize(
    "ids, parents, words",
    [
        ([0, 2, 1], [-1, 0, 0], "row 0 has 2 at 1 and 1 after it"),
        (IDS, [-1, 0], "ids must be from 0 to 1, as there are 2 parents, got 0 to 2"),
        (IDS, [-1, 1, 0], "got 1 for segment 1 of row 0"),
        ([IDS] * 2, [[-1, 0, 0], [-1, 0, -2]], "got -2 for segment 2 of row 1"),
        (IDS, [-1.0, 0.0, 0.0], r"parents must be integers .*got float64 \(1, 3\)"),
        ([IDS] * 2, [[-1, 0, 0]] * 3, r"rows of ids.shape=\(2, 4\), .*\(3, 3\)"),
    ],
)
def test_what_is_no_tree_is_refused(ids, parents, words):
    with pytest.raises(ValueError, match=words):
        tree(np.array(ids), np.array(parents))


def test_traced_trees_and_padding_in_a_part_of_a_union_are_refused():
    with pytest.raises(ValueError, match="tree ids must be known while tracing"):
        jax.jit(lambda ids: tree(ids, [-1]).bounds)(np.zeros(4, int))
    with pytest.raises(ValueError, match=r"write \(a \| b\) & padding\(n\)"):
        masks.first(3) | masks.causal() & masks.padding(7)
    with pytest.raises(ValueError, match=r"\| must join two masks.*got causal$"):
        masks.causal() | masks.causal
