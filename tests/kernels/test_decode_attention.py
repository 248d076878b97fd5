"""Attention to a sharded cache against the oracle, and writing to one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import decode_attention, masks
from kernels.backends import reference
from kernels.decode_attention import CachedAttention
from kernels.layouts import Contiguous
from kernels.masks import Visible
from kernels.ring.attend import Ring, attend
from tests.cases import table
from tests.cases.attention import QUICK

LAYERS, BATCH, SLOTS, HEADS, KV_HEADS, DEPTH, NEW = 3, 2, 24, 4, 2, 8, 3
EMPTY = np.iinfo(np.int32).max
LENGTHS = 17, 9
"""Tokens of each row; the other slots are free."""


def mesh_of(ring: int, tensor: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: ring * tensor]).reshape(ring, tensor)
    return Mesh(devices, ("ring", "tensor"))


@functools.cache
def programs(ring: int, tensor: int) -> tuple:
    """Compiles fill, put and attend."""
    cached = CachedAttention(mesh_of(ring, tensor))
    methods = cached.fill, cached.put, cached.attend
    return tuple(jax.jit(method, compiler_options=QUICK) for method in methods)


class Problem:
    """Tokens in slots that were drawn by lot, with rubbish in the free ones."""

    def __init__(self, rng: np.random.Generator, dtype: jnp.dtype = jnp.float32):
        def normal(*shape: int) -> np.ndarray:
            return np.array(jnp.asarray(rng.standard_normal(shape), dtype))

        self.q = normal(BATCH, NEW, HEADS, DEPTH)
        self.keys, self.values = (
            normal(LAYERS, BATCH, SLOTS, KV_HEADS, DEPTH) for _ in range(2)
        )
        self.index = np.full((BATCH, SLOTS), EMPTY, np.int32)
        for row, length in enumerate(LENGTHS):
            places = rng.permutation(SLOTS)[:length]
            self.index[row, places] = np.arange(length)
        # The last tokens of each row; the last query of the last row has no keys.
        k_end = np.array(LENGTHS)[:, None] - NEW + np.arange(NEW) + 1
        k_end[-1, -1] = 0
        k_start = np.broadcast_to([[0], [4]], k_end.shape)
        self.visible = Visible(k_start.astype(np.int32), k_end.astype(np.int32))

    def attended(self, attend, layer: int, *sinks) -> jax.Array:
        arrays = self.q, self.keys, self.values, self.index
        return attend(*arrays, self.visible, np.int32(layer), *sinks)

    def expected(self, layer: int, sinks=None, soft_cap=None) -> np.ndarray:
        """By the oracle in float64, with the keys in the order of their index."""
        order = np.argsort(self.index, axis=1)[..., None, None]
        k, v = (
            np.take_along_axis(x[layer].astype(np.float64), order, axis=1)
            for x in (self.keys, self.values)
        )
        one = Ring(None, 1, Contiguous(), DEPTH**-0.5, reference, soft_cap)
        with jax.enable_x64():
            bounds = map(np.int32, self.visible.intervals())
            return np.asarray(attend(one, np.float64(self.q), k, v, sinks, *bounds)[0])


@pytest.mark.parametrize("ring, tensor", [(1, 1), (2, 2), (4, 1), (8, 1)])
def test_attention_is_the_oracles_whatever_slot_a_key_is_in(ring, tensor, rng):
    problem, (_, _, attend) = Problem(rng), programs(ring, tensor)
    for layer in (0, 2):
        got = problem.attended(attend, layer)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, problem.expected(layer), atol=1e-5)
        assert (np.asarray(got)[-1, -1] == 0).all()


@pytest.mark.parametrize("ring, tensor, soft_cap", [(1, 1, 1.2), (4, 2, None)])
def test_sinks_and_caps_of_a_cache_are_those_of_attention(ring, tensor, soft_cap, rng):
    problem, sinks = Problem(rng), np.float32(rng.standard_normal(HEADS))
    cached = CachedAttention(mesh_of(ring, tensor), soft_cap=soft_cap)
    got = problem.attended(jax.jit(cached.attend), 1, sinks)
    want = problem.expected(1, np.float64(sinks), soft_cap)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "axes, ring_axes", [(("data", "ring"), "ring"), (("outer", "inner"),) * 2]
)
def test_explicit_meshes_rings_of_two_axes_and_bounds_of_all_rows_will_do(
    axes, ring_axes, rng
):
    """As `jax.make_mesh` makes them, and a mask gives bounds of one row."""
    mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[:4])
    cached, problem = CachedAttention(mesh, ring_axes), Problem(rng)
    ends = np.array([[5, 6, 7]], np.int32)
    alike = problem.visible = Visible(np.zeros_like(ends), ends)
    got = problem.attended(jax.jit(cached.attend), 2)
    problem.visible = Visible(*(np.repeat(bound, BATCH, 0) for bound in alike))
    np.testing.assert_allclose(got, problem.expected(2), atol=1e-5)
    new, want = problem.values[0, :, :2], problem.keys.copy()
    members = 2 if ring_axes == "ring" else 4
    first = SLOTS * (members - 1) // members + 3
    want[2, :, first : first + 2] = new
    place = np.int32(2), np.int32(members - 1), np.int32(3)
    np.testing.assert_array_equal(jax.jit(cached.put)(problem.keys, new, *place), want)
    filled = np.asarray(cached.fill(problem.keys, problem.values[0, :, :4], 1))
    np.testing.assert_array_equal(filled[1, :, : 4 // members], new[:, : 4 // members])


@pytest.mark.parametrize("rows", [1, BATCH])
def test_a_branch_of_a_tree_sees_its_prompt_and_itself_in_a_cache(rows, rng):
    """Two intervals of the slots that tokens lie in, whatever these are."""
    problem, (_, _, attend) = Problem(rng), programs(4, 1)
    k_start = np.broadcast_to([[[0]], [[5]]], (2, rows, NEW))
    k_end = np.broadcast_to(np.arange(NEW) + [[[2]], [[6]]], (2, rows, NEW))
    problem.visible = Visible(k_start, k_end)
    got = problem.attended(attend, 0)
    np.testing.assert_allclose(got, problem.expected(0), atol=1e-5)


@pytest.mark.thorough
def test_bounds_beyond_int32_reach_all_keys(rng):
    """As in `attention`; wrapped around, they would be empty."""
    problem, cached = Problem(rng), CachedAttention(mesh_of(4))
    far = np.full((BATCH, problem.q.shape[1]), 2**40)
    problem.visible = Visible(-far, far)
    got = problem.attended(cached.attend, 0)
    problem.visible = Visible(0 * far, 0 * far + np.array(LENGTHS)[:, None])
    np.testing.assert_allclose(got, problem.expected(0), atol=1e-5)


def test_bfloat16_is_as_near_as_one_rounding_allows(rng):
    problem, (_, _, attend) = Problem(rng, jnp.bfloat16), programs(4, 1)
    got = problem.attended(attend, 1)
    assert got.dtype == jnp.bfloat16
    want = problem.expected(1)
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < 1e-2


@pytest.mark.thorough(quick=3)
@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("live", [0, 1, 3, 4, 5, 11, 12])
def test_slots_behind_the_live_ones_are_not_read(ring, live, rng, monkeypatch):
    """They hold NaN, from twice the live ones on; 3 slots are always read."""
    monkeypatch.setattr(decode_attention, "FEWEST_SLOTS", 3)
    problem, mine = Problem(rng), SLOTS // ring
    problem.index[:] = EMPTY
    problem.index[:, :live] = np.arange(live)
    ends = np.full((BATCH, NEW), live, np.int32)
    problem.visible = Visible(np.zeros_like(ends), ends)
    want = problem.expected(0)
    read = min(size for size in (3, 6, 12, 24) if size >= live)
    stacks = (problem.keys, problem.values)
    shards = [x.reshape(LAYERS, BATCH, ring, mine, -1) for x in stacks]
    for stack in shards:
        stack[:, :, 0, read:] = np.nan
        stack[:, :, 1:, 3:] = np.nan
    attend = jax.jit(CachedAttention(mesh_of(ring)).attend, compiler_options=QUICK)
    np.testing.assert_allclose(problem.attended(attend, 0), want, atol=1e-5)


@pytest.mark.parametrize("ring, tensor", [(2, 2), (4, 1)])
def test_shards_of_a_prompt_are_the_members_first_slots(ring, tensor, rng):
    fill, problem = programs(ring, tensor)[0], Problem(rng)
    new = problem.values[0, :, : 2 * ring]
    got = np.asarray(fill(problem.keys, new, np.int32(1)))
    want = problem.keys.copy()
    shards = want[1].reshape(BATCH, ring, SLOTS // ring, KV_HEADS, DEPTH)
    shards[:, :, :2] = new.reshape(BATCH, ring, 2, KV_HEADS, DEPTH)
    np.testing.assert_array_equal(got, want)
    index = np.asarray(fill(problem.index[None], problem.index[:, :ring], np.int32(0)))
    shards = index[0].reshape(BATCH, ring, SLOTS // ring)
    np.testing.assert_array_equal(shards[:, :, 0], problem.index[:, :ring])
    assert (index[0] == problem.index).sum() >= BATCH * (SLOTS - ring)


@pytest.mark.parametrize("member, slot", [(0, 0), (2, 3), (3, 4)])
def test_new_tokens_are_put_into_one_members_slots(member, slot, rng):
    put, problem = programs(4, 1)[1], Problem(rng)
    new = problem.values[0, :, :2]
    place = np.int32(2), np.int32(member), np.int32(slot)
    want = problem.keys.copy()
    first = member * SLOTS // 4 + slot
    want[2, :, first : first + 2] = new
    np.testing.assert_array_equal(put(problem.keys, new, *place), want)


def test_writing_takes_the_place_of_the_old_cache(rng):
    mesh = mesh_of(4)
    put = jax.jit(CachedAttention(mesh).put, donate_argnums=0)
    stack = jax.device_put(
        Problem(rng).keys, NamedSharding(mesh, P(None, None, "ring", "tensor"))
    )
    new = np.ones((BATCH, 1, KV_HEADS, DEPTH), np.float32)
    place = np.int32(0), np.int32(1), np.int32(2)
    memory = put.lower(stack, new, *place).compile().memory_analysis()
    assert memory.alias_size_in_bytes == stack.nbytes // 4
    assert memory.temp_size_in_bytes < stack.nbytes // 4 // LAYERS


NEW_TOKENS = np.ones((BATCH, 4, KV_HEADS, DEPTH), np.float32)
KNOWN = {"new": NEW_TOKENS, "np": np, "jnp": jnp, "masks": masks, "Visible": Visible}


@pytest.mark.parametrize(
    "method, arguments, words", table("kernels.txt", "refused", **KNOWN)
)
def test_what_would_be_written_in_part_or_elsewhere_is_refused(
    method, arguments, words, rng
):
    """Of a cache of 3 layers, 2 rows and 24 slots on 4 members."""
    problem, cached = Problem(rng), CachedAttention(mesh_of(4))
    with pytest.raises(ValueError, match=words):
        if method != "attend":
            getattr(cached, method)(problem.keys, *arguments)
        changes, layer = arguments
        for name, change in changes.items():
            setattr(problem, name, change(getattr(problem, name)))
        problem.attended(cached.attend, layer)


@pytest.mark.parametrize("options, words", table("kernels.txt", "cache"))
def test_a_cache_that_cannot_be_on_a_mesh_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        CachedAttention(mesh_of(4), **options)
