"""`attention` on one device: masks, types and padding with every implementation.

What a backend does with intervals is in `test_backends`.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import backends as backend
from kernels import masks
from kernels.attention import attention, attention_with_lse
from kernels.backends import tokamax_gpu
from kernels.masks import Visible
from tests.cases import in_tiers, table
from tests.cases.attention import (
    BFLOAT16_RATIO,
    FLOAT32_TOLERANCE,
    Answer,
    Problem,
    solve,
)
from tests.support.simulated import BACKENDS
from tests.support.steps import StepCase, compiled, truth
from tests.support.steps import answer as step_answer

# Lengths that leave a rest in any tile. All bounds (B, T): one shape to compile.
BATCH, QUERIES, KEYS, HEADS, KV_HEADS, DEPTH = 2, 270, 300, 4, 2, 8


HOPPER = "hopper", "hopper_deterministic"
IN_16_BITS = *HOPPER, "tokamax"


def each_of(names: Iterable[str], *others: str) -> pytest.MarkDecorator:
    """Where kernels are interpreted, which takes long, those of GPUs are slow tests.

    others: that are, too.
    """
    slow = {*HOPPER, "triton", *others} if jax.default_backend() == "cpu" else set()
    marked = [
        pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names
    ]
    return pytest.mark.parametrize("implementation", marked)


each_implementation = each_of(backend.IMPLEMENTATIONS)
in_float32 = each_of(
    [name for name in backend.IMPLEMENTATIONS if name not in IN_16_BITS], "pallas_tpu"
)


def dtype_of(implementation: str) -> jnp.dtype:
    """What it computes in, preferably in float32."""
    return jnp.bfloat16 if implementation in IN_16_BITS else jnp.float32


def problem(
    rng: np.random.Generator, mask: masks.Mask, dtype: jnp.dtype = jnp.float32
) -> Problem:

    def normal(*shape: int) -> np.ndarray:
        x = rng.standard_normal((BATCH, *shape, DEPTH)).astype(dtype)
        return x.astype(np.float64)

    visible = mask(np.arange(QUERIES, dtype=np.int32), KEYS)
    repeated = (np.repeat(x, BATCH // x.shape[0], axis=0) for x in visible)
    return Problem(
        q=normal(QUERIES, HEADS),
        k=normal(KEYS, KV_HEADS),
        v=normal(KEYS, KV_HEADS),
        do=normal(QUERIES, HEADS),
        d_lse=rng.standard_normal((BATCH, HEADS, QUERIES)),
        visible=Visible(*repeated),
    )


@functools.partial(jax.jit, static_argnames=("mask", "implementation"))
def results(q, k, v, do, d_lse, visible, implementation, mask=None):
    """(out, lse, dq, dk, dv)."""
    visible = visible if mask is None else mask
    run = functools.partial(
        attention_with_lse, visible=visible, implementation=BACKENDS[implementation]
    )
    found, pull = jax.vjp(run, q, k, v)
    return *found, *pull((do, d_lse))


def solve_by_attention(
    given: Problem, implementation: str, dtype: jnp.dtype | None = None
) -> tuple[jax.Array, ...]:
    dtype = dtype or dtype_of(implementation)
    q, k, v, do = (jnp.asarray(x, dtype) for x in (given.q, given.k, given.v, given.do))
    d_lse = jnp.asarray(given.d_lse, jnp.float32)
    held = given.visible, None
    if isinstance(given.visible, masks.Mask):
        held = None, given.visible
    return results(q, k, v, do, d_lse, held[0], implementation, held[1])


def answer(found: tuple[jax.Array, ...]) -> Answer:
    return Answer(*(np.asarray(x, np.float64) for x in found))


def assert_equal(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


IDS = np.sort(np.random.default_rng(0).integers(0, 6, (BATCH, KEYS)), axis=1)
REAL = np.array([[140], [290]], np.int32)

MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "window": masks.window(50),
    "rows of their own": masks.documents(IDS),
    "empty rows": masks.padding(REAL) & masks.prefix(9),
}


@pytest.mark.thorough(quick=2)
@in_float32
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_match_the_reference_in_float64(name, implementation, rng):
    given = problem(rng, MASKS[name])
    found = solve_by_attention(given, implementation)
    assert {x.dtype for x in found} == {np.dtype(np.float32)}
    errors = answer(found).errors(solve(given, jnp.float64))
    assert max(errors.values()) <= FLOAT32_TOLERANCE, errors


def test_bfloat16_is_as_exact_as_the_reference_in_bfloat16(rng):
    given = problem(rng, masks.causal(), jnp.bfloat16)
    found = solve_by_attention(given, "blockwise", jnp.bfloat16)
    assert [x.dtype.name for x in found] == ["bfloat16", "float32"] + ["bfloat16"] * 3
    truth = solve(given, jnp.float64)
    errors = answer(found).errors(truth)
    for name, allowed in solve(given, jnp.bfloat16).errors(truth).items():
        assert errors[name] <= BFLOAT16_RATIO * allowed + 1e-6, name


@pytest.mark.thorough
@each_implementation
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_huge_numbers_in_other_documents_leave_no_trace(implementation, rng):
    given = problem(rng, masks.documents(np.repeat(np.arange(3), 100)))
    want = solve_by_attention(given, implementation)
    middle, others = slice(100, 200), np.r_[0:100, 200:300]
    # Scores of 1e9 and more overflow in the kernels of GPUs, see `hopper`.
    given.k[:, others] = 1e7 if implementation in (*HOPPER, "triton") else 1e15
    given.v[:, others] = -1e30
    found = solve_by_attention(given, implementation)
    assert_equal(found[1][..., middle], want[1][..., middle])
    for a, b in zip(found[:1] + found[2:], want[:1] + want[2:], strict=True):
        assert_equal(a[:, middle], b[:, middle])


def test_queries_see_the_past_scaled_by_the_head_size_by_default(rng):
    given = problem(rng, masks.causal())
    run = functools.partial(
        attention,
        *(jnp.asarray(x, jnp.float32) for x in (given.q, given.k, given.v)),
        implementation="blockwise",
    )
    past = {"visible": masks.causal(), "scale": DEPTH**-0.5}
    assert_equal(run(), run(**past))
    assert np.abs(run(**past | {"scale": 0.7}) - run()).max() > 0.01


@pytest.mark.thorough
@each_implementation
def test_vmap_of_rows_under_checkpoint_equals_the_batch(implementation, rng):
    """Bounds mapped too, gradients included."""
    given = problem(rng, masks.documents(IDS))
    want = solve_by_attention(given, implementation)
    dtype = dtype_of(implementation)
    arrays = (x.astype(dtype) for x in (given.q, given.k, given.v, given.do))
    arrays = *arrays, given.d_lse, given.visible
    arrays = jax.tree.map(lambda x: x[:, None], arrays)  # each row a batch of one

    # Pallas' interpreter for GPUs has effects, which a checkpoint refuses.
    is_interpreted = jax.default_backend() == "cpu"

    @jax.jit
    @jax.vmap
    def of_row(q, k, v, do, d_lse, visible):
        def run(q, k, v):
            return attention_with_lse(
                q, k, v, visible=visible, implementation=BACKENDS[implementation]
            )

        if not (is_interpreted and implementation in HOPPER):
            run = jax.checkpoint(run)
        found, pull = jax.vjp(run, q, k, v)
        return *found, *pull((do, d_lse))

    got = of_row(*jax.tree.map(jnp.asarray, arrays))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a[:, 0], b, rtol=1e-5, atol=1e-5)


def test_padding_may_hold_anything(rng):
    """Also gradients that come back to it: all else is what it is beside zeros."""
    mask = MASKS["empty rows"]
    given = problem(rng, mask)
    want = solve_by_attention(given, "blockwise")
    of_queries, of_keys = (np.arange(length) >= REAL for length in (QUERIES, KEYS))
    for x, rubbish in (given.q, np.nan), (given.do, np.inf):
        x[of_queries] = rubbish
    for x, rubbish in (given.k, np.inf), (given.v, np.nan):
        x[of_keys] = rubbish
    given.d_lse.transpose(0, 2, 1)[of_queries] = np.nan
    given = dataclasses.replace(given, visible=mask)
    assert_equal(solve_by_attention(given, "blockwise"), want)


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_scores_far_apart_do_not_overflow(scale):
    """Of 300 and -300: the mean of the values of every other key."""
    q = jnp.zeros((1, QUERIES, 1, DEPTH)).at[..., 0].set(300.0)
    sign = jnp.float32(np.arange(KEYS) % 2 * 2 - 1)
    k = jnp.zeros((1, KEYS, 1, DEPTH)).at[..., 0].set(sign[None, :, None])
    v = jnp.broadcast_to(sign[None, :, None, None], k.shape)
    full = {"visible": masks.full(), "scale": scale}
    np.testing.assert_allclose(attention(q, k, v, **full), scale, rtol=1e-5)


def test_masks_without_padding_leave_the_program_as_it_is():
    x = jax.ShapeDtypeStruct((1, 64, 2, 8), jnp.float32)
    mask = masks.causal() & masks.window(9)

    def program(visible):
        run = functools.partial(attention, visible=visible, implementation="reference")
        return jax.jit(run).lower(x, x, x).as_text()

    index = np.arange(64, dtype=np.int32)
    selects = [
        program(each).count("stablehlo.select")
        for each in (mask(index, 64), mask, mask & masks.padding(50))
    ]
    assert selects[0] == selects[1] < selects[2]


@pytest.mark.thorough
def test_memory_of_loops_is_linear_in_the_length_and_far_below_the_score_matrix():
    """Bytes that a program needs beside its arguments and results."""

    def forward(q, k, v):
        return attention(q, k, v, implementation="blockwise")

    def both(q, k, v):
        return jax.vjp(forward, q, k, v)[1](q)

    def used(function, length: int) -> int:
        x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
        program = jax.jit(function).lower(x, x, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    scores = 8 * 4096**2 * 4  # bytes of all heads
    assert 0 < used(forward, 4096) < used(both, 4096) < scores / 8
    assert used(both, 4096) < 2.1 * used(both, 2048)


SCALED = StepCase(60, 130, group=2, batch=1)
DIGITS = {jnp.float32: 1e-5, jnp.float16: 5e-4, jnp.bfloat16: 1e-2}
"""Largest norms of errors, relative to the norm of what is compared."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, dtype, scale", in_tiers("kernels.txt", "scales", jnp=jnp)
)
def test_small_scales_cost_no_digits(name, dtype, scale, rng):
    """Errors of dq and dk are relative to gradients as small as the scale."""
    case = dataclasses.replace(SCALED, scale=scale)
    step = case.draw(rng, dtype)
    step = step._replace(dq=np.zeros_like(step.dq))
    if dtype != jnp.float16:
        # Denormal gradients would be flushed to 0.
        step = step._replace(do=step.do * 2.0**20, delta=step.delta * 2.0**20)
    got = step_answer(compiled(BACKENDS[name], scale)(step.astype(dtype)), step)
    exact = truth(case, step)
    assert (np.isneginf(got.lse) == np.isneginf(exact.lse)).all()
    for field in ("out", "dv", "dq", "dk"):
        x, true = (getattr(it, field) for it in (got, exact))
        size = np.linalg.norm(true)
        assert size > 0
        # A denormal scale leaves nothing of dq and dk.
        error = np.linalg.norm(x - true) / max(size, 1e-30)
        assert error <= DIGITS[dtype], (field, error)


@pytest.mark.parametrize(
    "kind, dtype, depth, name", table("kernels.txt", "best", jnp=jnp)
)
def test_best_implementation_suits_the_device_and_the_operands(
    kind, dtype, depth, name, monkeypatch
):
    """kind: of a device, and of what is installed beside it."""
    monkeypatch.setattr(backend, "device_kind", lambda: kind)
    if "without jax-triton" in kind:
        monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    version = kind.partition("tokamax ")[2] or None
    monkeypatch.setattr(tokamax_gpu, "installed_version", lambda: version)
    assert backend.choose(None, dtype, depth) is backend.IMPLEMENTATIONS[name]


def test_operands_over_a_mesh_are_refused_where_loops_cannot_take_them():
    """With the call that can."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows = jax.device_put(jnp.ones((2, 8, 2, 8)), NamedSharding(mesh, P("data")))
    blockwise = functools.partial(attention, implementation="blockwise")
    mapped = jax.shard_map(
        blockwise, mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    np.testing.assert_array_equal(mapped(*3 * [rows]), 1)
    with pytest.raises(ValueError, match="sharded over data: use make_ring_attention"):
        jax.jit(blockwise)(*3 * [rows])


def test_rows_that_see_nothing_see_their_sink(rng):
    given = problem(rng, masks.full())
    given = given.q, given.k, given.v
    q, k, v = (jnp.asarray(x, jnp.float32) for x in given)
    sinks = jnp.asarray(rng.standard_normal(HEADS), jnp.float32).at[0].set(-np.inf)
    nothing = Visible(*np.zeros((2, 1, QUERIES), np.int32))
    (out, lse), pull = jax.vjp(
        lambda sinks: attention_with_lse(q, k, v, visible=nothing, sinks=sinks), sinks
    )
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_allclose(lse, np.broadcast_to(sinks[:, None], lse.shape))
    (d_sinks,) = pull((jnp.ones_like(out), jnp.ones_like(lse)))
    # lse is the sink, where there is one.
    np.testing.assert_allclose(
        d_sinks, BATCH * QUERIES * np.isfinite(sinks).astype(int)
    )
