"""Every mask against the boolean matrix that it stands for."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import masks
from kernels.masks import Visible

QUERIES = 23
TOKENS = 30
INDEX = np.arange(QUERIES, dtype=np.int32)
IDS = np.sort(np.random.default_rng(0).integers(-2, 4, (2, TOKENS)), 1).astype(np.int32)
STARTS = np.flatnonzero(np.diff(IDS[0], prepend=IDS[0, 0] - 1))
LENGTHS = np.array([[5], [19]], np.int32)

# A mask, and whether query i of row b sees key j.
MASKS = {
    "full": (masks.full(), lambda b, i, j: j == j),
    "causal": (masks.causal(), lambda b, i, j: j <= i),
    "window of one": (masks.window(1), lambda b, i, j: j == i),
    "window": (masks.window(5), lambda b, i, j: (i - 5 < j) & (j <= i)),
    "long window": (masks.window(99), lambda b, i, j: j <= i),
    "empty prefix": (masks.prefix(0), lambda b, i, j: j <= i),
    "prefix": (masks.prefix(7), lambda b, i, j: (j <= i) | (j < 7)),
    "prefixes": (masks.prefix(LENGTHS), lambda b, i, j: (j <= i) | (j < LENGTHS[b, 0])),
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
    "documents at": (
        masks.documents_at(STARTS),
        lambda b, i, j: (IDS[0, i] == IDS[0, j]) & (j <= i),
    ),
}

each_mask = pytest.mark.parametrize("name", MASKS)


def seen_by(visible: Visible, keys: int) -> np.ndarray:
    """(B, T, S): the boolean matrix of some bounds."""
    key = np.arange(keys)
    return (visible.lo[..., None] <= key) & (key <= visible.hi[..., None])


def assert_equal_bounds(got: Visible, want: Visible) -> None:
    np.testing.assert_array_equal(got.lo, want.lo)
    np.testing.assert_array_equal(got.hi, want.hi)


@each_mask
@pytest.mark.parametrize("queries, keys", [(30, 30), (23, 30), (30, 9)])
def test_a_query_sees_exactly_the_keys_from_lo_to_hi(name, queries, keys):
    mask, sees = MASKS[name]
    visible = mask(np.arange(queries, dtype=np.int32), keys)
    rows = visible.lo.shape[0]
    want = sees(*np.ogrid[:rows, :queries, :keys])
    np.testing.assert_array_equal(
        seen_by(visible, keys), np.broadcast_to(want, (rows, queries, keys))
    )


@each_mask
def test_bounds_never_decrease(name):
    for bound in MASKS[name][0](INDEX, TOKENS):
        assert (np.diff(bound) >= 0).all()


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
def test_part_of_a_sequence_in_any_order_has_the_bounds_of_the_whole(name):
    mask, _ = MASKS[name]
    whole = mask(INDEX, TOKENS)
    rng = np.random.default_rng()
    part = rng.permutation(INDEX)[:11]
    assert_equal_bounds(mask(part, TOKENS), Visible(*(x[:, part] for x in whole)))
    parts = np.stack([rng.permutation(INDEX)[:11] for _ in range(2)])
    rows = (np.broadcast_to(bound, (2, QUERIES)) for bound in whole)
    want = Visible(*(np.take_along_axis(bound, parts, 1) for bound in rows))
    assert_equal_bounds(mask(parts, TOKENS), want)
    assert_equal_bounds(mask(jnp.asarray(parts), TOKENS), want)


@pytest.mark.parametrize("first, second", list(itertools.combinations(MASKS, 2)))
def test_and_is_the_intersection_of_both_masks(first, second):
    one, other = MASKS[first][0], MASKS[second][0]
    want = seen_by(one(INDEX, TOKENS), TOKENS) & seen_by(other(INDEX, TOKENS), TOKENS)
    for both in one & other, other & one:
        visible = both(INDEX, TOKENS)
        assert visible.lo.shape == visible.hi.shape
        assert all((np.diff(bound) >= 0).all() for bound in visible)
        np.testing.assert_array_equal(seen_by(visible, TOKENS), want)


def test_shared_bounds_are_not_repeated_over_the_batch():
    shared = {name for name in MASKS if MASKS[name][0](INDEX, TOKENS).lo.shape[0] == 1}
    assert MASKS.keys() - shared == {
        "prefixes", "paddings", "segments", "documents"
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_documents_by_id_and_by_start_are_the_same(seed):
    rng = np.random.default_rng(seed)
    begins = rng.random(TOKENS) < 0.3
    ids = np.cumsum(begins * rng.integers(1, 5, TOKENS))
    starts = np.flatnonzero(np.diff(ids, prepend=-1))
    got, want = masks.documents_at(starts), masks.documents(ids)
    index = np.arange(TOKENS, dtype=np.int32)
    assert_equal_bounds(got(index, TOKENS), want(index, TOKENS))


def test_ids_that_are_traced_are_trusted():
    @jax.jit
    def bounds(ids, index):
        return masks.documents(ids)(index, TOKENS)

    index = jnp.asarray(INDEX)
    want = masks.documents(IDS)(INDEX, TOKENS)
    assert_equal_bounds(bounds(jnp.asarray(IDS), index), want)
    assert_equal_bounds(masks.documents(jnp.asarray(IDS))(index, TOKENS), want)
    assert bounds(jnp.asarray(IDS[:, ::-1]), index).lo.shape == (2, QUERIES)


def test_lengths_that_are_traced_give_the_same_bounds():
    @jax.jit
    def bounds(lengths, index):
        return (masks.prefix(lengths) & masks.padding(lengths))(index, TOKENS)

    want = (masks.prefix(LENGTHS) & masks.padding(LENGTHS))(INDEX, TOKENS)
    assert_equal_bounds(bounds(jnp.asarray(LENGTHS), jnp.asarray(INDEX)), want)


@pytest.mark.parametrize("size", [0, -3])
def test_window_without_the_query_itself_is_refused(size):
    with pytest.raises(ValueError, match=f"size={size} must be at least 1 token"):
        masks.window(size)


def test_negative_prefix_is_refused():
    with pytest.raises(ValueError, match="length=-1 must not be negative"):
        masks.prefix(-1)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("build", [masks.documents, masks.segments])
def test_decreasing_ids_are_refused_with_their_place(build, array):
    ids = array([[0, 0, 1, 1, 2], [3, 4, 7, 5, 5]])
    with pytest.raises(ValueError, match="row 1 has 7 at 2 and 5 after it"):
        build(ids)


@pytest.mark.parametrize("shape", [(), (1, 2, 3)])
def test_ids_of_another_rank_are_refused(shape):
    with pytest.raises(ValueError, match=r"\(T,\) or \(B, T\), got ids.shape="):
        masks.documents(np.zeros(shape, np.int32))


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("starts", [[], [1, 4], [0, 4, 4], [0, 5, 3]])
def test_document_starts_that_do_not_increase_from_zero_are_refused(starts, dtype):
    with pytest.raises(ValueError, match=f"increase from 0.*{len(starts)} in all"):
        masks.documents_at(np.array(starts, dtype))
