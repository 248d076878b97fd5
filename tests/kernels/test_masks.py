"""Every mask against the boolean matrix that it stands for."""

import inspect
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import masks, trees
from kernels.masks import Visible
from tests.cases import table
from tests.cases.unions import shown_in_tree

QUERIES = 23
TOKENS = 30
INDEX = np.arange(QUERIES, dtype=np.int32)
IDS = np.sort(np.random.default_rng(0).integers(-2, 4, (2, TOKENS)), 1).astype(np.int32)
LENGTHS = np.array([[5], [19]], np.int32)

TREE = np.sort(np.random.default_rng(1).integers(0, 8, (2, TOKENS)), axis=1)
SHOWN = np.stack([shown_in_tree(ids, [-1, 0, 0, -1, 3, 4, 4, 3]) for ids in TREE])

# A mask, and whether key j is visible to query i of row b.
MASKS = {
    "full": (masks.full(), lambda b, i, j: j == j),
    "causal": (masks.causal(), lambda b, i, j: j <= i),
    "window of one": (masks.window(1), lambda b, i, j: j == i),
    "window": (masks.window(5), lambda b, i, j: (i - 5 < j) & (j <= i)),
    "long window": (masks.window(99), lambda b, i, j: j <= i),
    "empty prefix": (masks.prefix(0), lambda b, i, j: j <= i),
    "prefix": (masks.prefix(7), lambda b, i, j: (j <= i) | (j < 7)),
    "prefixes": (masks.prefix(LENGTHS), lambda b, i, j: (j <= i) | (j < LENGTHS[b, 0])),
    "first": (masks.first(7), lambda b, i, j: j < 7),
    "firsts": (masks.first(LENGTHS), lambda b, i, j: j < LENGTHS[b, 0]),
    "window and first": (
        masks.window(5) | masks.first(LENGTHS) & masks.causal(),
        lambda b, i, j: (j <= i) & ((i - 5 < j) | (j < LENGTHS[b, 0])),
    ),
    "tree": (
        trees.tree(TREE, [-1, 0, 0, -1, 3, 4, 4, 3]),
        lambda b, i, j: SHOWN[b, i, j],
    ),
    "padding": (masks.padding(17), lambda b, i, j: (i < 17) & (j < 17)),
    "paddings": (
        masks.padding(LENGTHS),
        lambda b, i, j: (i < LENGTHS[b, 0]) & (j < LENGTHS[b, 0]),
    ),
    "all padding": (masks.padding(0), lambda b, i, j: j < 0),
    "segments": (masks.segments(IDS), lambda b, i, j: IDS[b, i] == IDS[b, j]),
    "segments of one row": (
        masks.segments(IDS[1]),
        lambda b, i, j: IDS[1, i] == IDS[1, j],
    ),
    "documents": (
        masks.documents(IDS),
        lambda b, i, j: (IDS[b, i] == IDS[b, j]) & (j <= i),
    ),
}

each_mask = pytest.mark.parametrize("name", MASKS)


def matrix(visible: Visible, keys: int) -> np.ndarray:
    """(B, T, S): the boolean matrix of bounds, whose intervals share no key."""
    k_start, k_end = (bound[..., None] for bound in visible.intervals())
    seen = np.asarray(masks.in_interval(k_start, np.arange(keys), k_end)).sum(axis=0)
    assert seen.max(initial=0) <= 1
    return seen > 0


def assert_equal_bounds(got: Visible, want: Visible) -> None:
    np.testing.assert_array_equal(got.k_start, want.k_start)
    np.testing.assert_array_equal(got.k_end, want.k_end)


@each_mask
@pytest.mark.parametrize("queries, keys", [(30, 30), (23, 30), (30, 9)])
def test_visible_keys_are_exactly_those_of_bounds_that_never_decrease(
    name, queries, keys
):
    mask, is_visible = MASKS[name]
    visible = mask(np.arange(queries, dtype=np.int32), keys)
    assert all((np.diff(bound) >= 0).all() for bound in visible)
    rows = visible.k_start.shape[-2]
    want = is_visible(*np.ogrid[:rows, :queries, :keys])
    np.testing.assert_array_equal(
        matrix(visible, keys), np.broadcast_to(want, (rows, queries, keys))
    )


def test_pictures_in_docstrings_are_the_masks():
    source = inspect.getsource(masks) + inspect.getsource(trees)
    pictures = re.findall(r"`(([a-z_]+)\(.*\))`:\n\n((?: +[01 ]+\n){4})", source)
    names = {name for _, name, _ in pictures}
    assert names == set(re.findall(r"^def ([a-z]\w*)\(.*-> Mask:", source, re.M))
    for call, _, picture in pictures:
        visible = eval(call, vars(masks) | vars(trees))(INDEX[:4], 4)
        want = np.array([line.split() for line in picture.splitlines()]) == "1"
        np.testing.assert_array_equal(matrix(visible, 4)[0], want, call)


@each_mask
def test_numpy_indices_give_numpy_bounds_and_jax_indices_the_same_in_jax(name):
    mask, _ = MASKS[name]
    want = mask(INDEX, TOKENS)
    assert all(isinstance(bound, np.ndarray) for bound in want)
    index = jnp.asarray(INDEX)
    for got in mask(index, TOKENS), jax.jit(lambda i: mask(i, TOKENS))(index):
        assert all(isinstance(bound, jax.Array) for bound in got)
        assert {bound.dtype for bound in (*want, *got)} == {np.dtype(np.int32)}
        assert_equal_bounds(got, want)


@each_mask
def test_part_of_a_sequence_in_any_order_has_the_bounds_of_the_whole(name, rng):
    mask, _ = MASKS[name]
    whole = mask(INDEX, TOKENS)
    part = rng.permutation(INDEX)[:11]
    assert_equal_bounds(mask(part, TOKENS), Visible(*(x[..., part] for x in whole)))
    parts = np.stack([rng.permutation(INDEX)[:11] for _ in range(2)])
    rows = np.array([[0], [min(1, whole.k_start.shape[-2] - 1)]])
    want = Visible(*(bound[..., rows, parts] for bound in whole))
    assert_equal_bounds(mask(parts, TOKENS), want)
    assert_equal_bounds(mask(jnp.asarray(parts), TOKENS), want)


@pytest.mark.parametrize("first, second", list(itertools.combinations(MASKS, 2)))
def test_and_is_the_intersection_of_both_masks(first, second):
    one, other = MASKS[first][0], MASKS[second][0]
    want = matrix(one(INDEX, TOKENS), TOKENS) & matrix(other(INDEX, TOKENS), TOKENS)
    for both in one & other, other & one:
        visible = both(INDEX, TOKENS)
        assert visible.k_start.shape == visible.k_end.shape
        assert all((np.diff(bound) >= 0).all() for bound in visible)
        np.testing.assert_array_equal(matrix(visible, TOKENS), want)


@pytest.mark.parametrize("first, second", list(itertools.combinations(MASKS, 2)))
def test_or_shows_what_either_mask_does_and_once(first, second):
    one, other = MASKS[first][0], MASKS[second][0]
    if one.real_lengths or other.real_lengths:
        pytest.raises(ValueError, lambda: one | other)
        return
    want = matrix(one(INDEX, TOKENS), TOKENS) | matrix(other(INDEX, TOKENS), TOKENS)
    for either in one | other, other | one:
        visible = either(INDEX, TOKENS)
        assert all((np.diff(bound) >= 0).all() for bound in visible)
        np.testing.assert_array_equal(matrix(visible, TOKENS), want)
        outline = either.outline(INDEX, TOKENS)
        np.testing.assert_array_equal(matrix(outline, TOKENS), want)


def test_shared_bounds_are_not_repeated_over_the_batch():
    shared = {
        name for name in MASKS if MASKS[name][0](INDEX, TOKENS).k_start.shape[-2] == 1
    }
    assert MASKS.keys() - shared == {
        "prefixes", "firsts", "window and first", "tree",
        "paddings", "segments", "documents",
    }  # fmt: skip


def test_ids_and_lengths_that_are_traced_are_trusted():
    @jax.jit
    def bounds(ids, lengths, index):
        mask = masks.prefix(lengths) & masks.padding(lengths)
        return masks.documents(ids)(index, TOKENS), mask(index, TOKENS)

    index, ids = jnp.asarray(INDEX), jnp.asarray(IDS)
    documents = masks.documents(IDS)(INDEX, TOKENS)
    some = (masks.prefix(LENGTHS) & masks.padding(LENGTHS))(INDEX, TOKENS)
    for got, want in zip(bounds(ids, LENGTHS, index), (documents, some), strict=True):
        assert_equal_bounds(got, want)
    assert_equal_bounds(masks.documents(ids)(index, TOKENS), documents)
    wrong, _ = bounds(ids[:, ::-1], LENGTHS, index)
    assert wrong.k_start.shape == (2, QUERIES)


HUGE = 2**40
DECREASING = [[0, 0, 1, 1, 2], [3, 4, 7, 5, 5]]
KNOWN = {"masks": masks, "np": np, "jnp": jnp, "int": int, "HUGE": HUGE, "IDS": IDS}
KNOWN |= {"INDEX": INDEX, "LENGTHS": LENGTHS, "DECREASING": DECREASING}


@pytest.mark.parametrize("build, words", table("kernels.txt", "masks", **KNOWN))
def test_wrong_arguments_are_refused_in_a_line(build, words):
    with pytest.raises(ValueError, match=words) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("index", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("build", [masks.documents, masks.segments])
def test_ids_that_do_not_cover_the_sequence_are_refused(build, index, array):
    mask = build(array(IDS[:, :20])) & masks.padding(20)
    assert mask(index(INDEX[:20]), 20).k_start.shape == (2, 20)
    part = np.array([3, 20], np.int32)
    for queries, keys, tokens in (INDEX, 23, 23), (INDEX, 20, 23), (part, 20, 21):
        words = f"sequence of {tokens} tokens, got 20 ids"
        with pytest.raises(ValueError, match=words):
            mask(index(queries), keys)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name, mask", table("kernels.txt", "beyond", **KNOWN))
def test_numbers_beyond_any_index_do_not_wrap_around(name, mask, array):
    for dtype in np.int8, np.int32:
        visible = mask(array(INDEX.astype(dtype)), TOKENS)
        assert visible.k_start.dtype == visible.k_end.dtype == np.int32
        want = MASKS[name][0](INDEX, TOKENS)
        np.testing.assert_array_equal(*(matrix(x, TOKENS) for x in (visible, want)))
