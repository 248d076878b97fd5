"""Random bounds and masks on random rings: right to float64, or refused in a line."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import checks as operands
from kernels import layouts as layout
from kernels import masks
from kernels.masks import Mask, Visible
from kernels.ring_attention import make_ring_attention
from tests.cases.attention import FLOAT32_TOLERANCE, LAYOUTS, QUICK, Problem, solve
from tests.rings import ring_mesh

CASES, SEED = 400, 19
RINGS = (1, "contiguous"), (2, "zigzag"), (2, "striped4"), (4, "striped")
TOKENS, BATCH, HEADS, KV_HEADS, DEPTH = 48, 2, 2, 1, 8
INDEX = np.arange(TOKENS, dtype=np.int32)
SIGNED = "int8", "int16", "int32", "int64"
OTHERS = "uint8", "uint32", "uint64", "float32", "bool"


def drawn_bounds(rng: np.random.Generator) -> tuple[Visible, bool]:
    """Draws bounds in the order of the sequence, and whether they are valid."""
    dtype = rng.choice(SIGNED if rng.random() < 0.9 else OTHERS)
    shape = rng.integers(1, BATCH + 1), TOKENS
    reach = (10**12 if dtype == "int64" else 120) if rng.random() < 0.3 else TOKENS + 9
    bounds = np.sort(rng.integers(-9, reach, (2, *shape)), axis=2)
    if rng.random() < 0.3:
        row, place = rng.integers(shape)
        bounds[rng.integers(2), row, place] += rng.integers(-9, 9)
    clipped = bounds.clip(0, TOKENS)
    is_sound = dtype in SIGNED and (np.diff(clipped) >= 0).all()
    return Visible(*bounds.astype(dtype)), bool(is_sound)


def drawn_mask(rng: np.random.Generator) -> tuple[Mask, bool]:
    """Draws a mask, and whether it is valid for these tokens."""
    mask, is_sound = masks.causal() if rng.random() < 0.7 else masks.full(), True
    if rng.random() < 0.4:
        mask &= masks.window(int(rng.choice([1, 5, TOKENS, 2**31, 2**40])))
    if rng.random() < 0.4:
        lengths = rng.integers(0, TOKENS + 9, (BATCH, 1)).astype(rng.choice(SIGNED))
        mask &= rng.choice([masks.prefix, masks.padding])(lengths)
    if rng.random() < 0.4:
        length = TOKENS + int(rng.choice([-1, 0, 7]))
        shape = rng.choice([1, BATCH]), length
        ids = np.sort(rng.integers(0, 5, shape), axis=1) + rng.choice([0, 2**40])
        mask &= rng.choice([masks.documents, masks.segments])(ids)
        is_sound = length >= TOKENS
    return mask, is_sound


@functools.cache
def program(ring_size: int, layout_name: str):
    """Attention of `shards` and its gradients, (out, dq, dk, dv)."""
    options = {"layout": LAYOUTS[layout_name], "implementation": "blockwise"}
    attend = make_ring_attention(ring_mesh(ring_size), **options)

    def run(q, k, v, do, k_start, k_end):
        out, pull = jax.vjp(lambda *qkv: attend(*qkv, Visible(k_start, k_end)), q, k, v)
        return out, *pull(do)

    return jax.jit(run, compiler_options=QUICK)


def largest_error(
    rng: np.random.Generator, visible: Visible, ring_size: int, layout_name: str
) -> float:
    """Returns the largest error of results and gradients against float64.

    visible: in layout order.
    """
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    arrays = [rng.standard_normal((BATCH, TOKENS, n, DEPTH), np.float32) for n in heads]
    order = LAYOUTS[layout_name], ring_size
    found = program(ring_size, layout_name)(
        *(layout.permute(x, *order) for x in arrays), *visible
    )
    in_order = Visible(*(layout.unpermute(np.asarray(x), *order) for x in visible))
    d_lse = np.zeros((BATCH, HEADS, TOKENS))
    truth = solve(Problem(*map(np.float64, arrays), d_lse, in_order), jnp.float64)
    errors = [
        np.linalg.norm(layout.unpermute(np.asarray(x), *order) - want)
        / max(np.linalg.norm(want), 1)  # dq is 0 where one key is visible
        for x, want in zip(
            found, (truth.out, truth.dq, truth.dk, truth.dv), strict=True
        )
    ]
    return max(errors)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_bounds_are_right_or_refused():
    rng = np.random.default_rng(SEED)
    refused = {True: 0, False: 0}
    q = jax.ShapeDtypeStruct((BATCH, TOKENS, HEADS, DEPTH), jnp.float32)
    for case in range(CASES):
        ring_size, layout_name = RINGS[rng.integers(len(RINGS))]
        index = layout.order(LAYOUTS[layout_name], ring_size, TOKENS)
        array = [np.asarray, jnp.asarray][rng.integers(2)]
        is_mask = rng.random() < 0.5
        given, is_sound = (drawn_mask if is_mask else drawn_bounds)(rng)
        try:
            if is_mask:
                visible = given(array(index), TOKENS)
            else:
                bounds = (bound[:, index] for bound in given)
                # JAX itself would narrow them.
                is_wide = given.k_start.dtype.itemsize > 4
                visible = Visible(*map(np.asarray if is_wide else array, bounds))
            visible = operands.checked_bounds(q, visible, TOKENS, index)
        except ValueError as error:
            assert not is_sound, (case, error)
            assert "\n" not in str(error) and "must" in str(error), (case, error)
            refused[is_mask] += 1
            continue
        assert is_sound, (case, given)
        error = largest_error(rng, visible, ring_size, layout_name)
        assert error <= FLOAT32_TOLERANCE, (case, error, ring_size, layout_name)
    assert min(refused.values()) > CASES // 100
