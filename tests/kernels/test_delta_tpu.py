"""The gated delta rule's TPU kernels, interpreted, against one token after another."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels.delta import rule, tpu
from kernels.delta.tpu import launch
from kernels.delta.tpu.chunk import inverses
from kernels.layouts import Contiguous, Zigzag
from tests.kernels.test_delta import DRAWS, check_ring, squared_errors
from tools.lib.compiled.pods import compile_for, tpu_devices

NAMES = "out", "state", "q", "k", "v", "log_decay", "beta", "first state"
ROWS, CHUNK, DEPTH = 2, 16, 16


def problem(
    rng: np.random.Generator, tokens: int, heads: tuple[int, int], has_map: bool
) -> tuple[Any, np.ndarray, Any]:
    """Operands, first tokens of documents, and what the results are multiplied with."""
    draw = rng.standard_normal
    key_heads, value_heads = heads
    keys = ROWS, tokens, key_heads, DEPTH
    q, k = (np.array(rule.normalised(jnp.float32(draw(keys)))) for _ in range(2))
    k[0, 3:9] = k[0, 3]  # equal keys: powers of their scores grow
    v = draw((ROWS, tokens, value_heads, DEPTH))
    log_decay = -rng.exponential(0.1, (ROWS, tokens, value_heads))
    beta = rng.random((ROWS, tokens, value_heads))
    beta[0, 3:9] = 1
    log_decay[0, 3:9] = 0
    for x in (q, k, v, log_decay, beta):
        x[1, tokens // 2 :][: tokens // 3] = 0
    is_first = rng.random((ROWS, tokens)) < 0.05
    is_first[0, [CHUNK, 2 * CHUNK - 1]] = True
    is_first[0, :CHUNK] = False
    state = draw((ROWS, value_heads, DEPTH, DEPTH * (1 + has_map)))
    ahead = draw((ROWS, tokens, value_heads, state.shape[-1])), draw(state.shape)
    return (q, k, v, log_decay, beta, state), is_first, ahead


def token_by_token(q, k, v, log_decay, beta, is_first, state):
    """The rule as it is written, in the operands' type."""
    heads = v.shape[2]
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    v = jnp.pad(v, [(0, 0)] * 3 + [(0, state.shape[-1] - v.shape[-1])])

    def step(state: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, beta, is_first = token
        state = jnp.exp(log_decay)[..., None, None] * state
        state = jnp.where(is_first[:, None, None, None], 0, state)
        new = beta[..., None] * (v - jnp.einsum("bhdv,bhd->bhv", state, k))
        state += jnp.einsum("bhd,bhv->bhdv", k, new)
        return state, jnp.einsum("bhdv,bhd->bhv", state, q)

    tokens = (q, k, v, log_decay, beta, is_first)
    over_tokens = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tokens)
    state, out = jax.lax.scan(step, state, over_tokens)
    return jnp.swapaxes(out, 0, 1), state


def compiled(function: Callable) -> Callable[..., list[np.ndarray]]:
    """Returns a function of operands, is_first and ahead, with results as NAMES."""

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(operands: Any, is_first: Any, ahead: Any) -> tuple[jax.Array, Any]:
        *tokens, state = operands
        out, state = function(*tokens, is_first, state)
        read = (out.astype(state.dtype) * ahead[0].astype(state.dtype)).sum()
        return read + (state * ahead[1]).sum(), (out, state)

    def answer(*arguments: Any) -> list[np.ndarray]:
        (_, results), gradients = jax.device_get(run(*arguments))
        return [np.asarray(x, np.float64) for x in (*results, *gradients)]

    return answer


def in_xla(q, k, v, *others):
    out, state = rule.gated_delta(q, k, v, *others)
    return out.astype(v.dtype), state


def interpreted(interpret: Any = True) -> Callable:
    return functools.partial(launch.gated_delta, interpret=interpret, chunk=CHUNK)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "dtype, tokens, heads, has_map, is_strong",
    [
        (jnp.float32, 3 * CHUNK + 5, (1, 2), True, False),
        (jnp.bfloat16, 3 * CHUNK, (1, 2), True, False),
        # Two programs of a key head, whose gradients are summed.
        (jnp.float32, 3 * CHUNK - 1, (1, 4), False, True),
        (jnp.bfloat16, 2 * CHUNK + 1, (2, 2), False, True),
    ],
)
def test_kernels_are_as_exact_as_xla(dtype, tokens, heads, has_map, is_strong, rng):
    """Against float64, token by token: at most twice the error of the rule in XLA."""
    by_tokens = compiled(token_by_token)
    in_turn = compiled(interpreted()), compiled(in_xla)
    squares = np.zeros((len(in_turn), len(NAMES)))
    for _ in range(DRAWS):
        operands, is_first, ahead = problem(rng, tokens, heads, has_map)
        *qkv, log_decay, beta, state = operands
        if is_strong:
            # Of some tokens, to -200 and beyond: others lie between large sums.
            is_here = rng.random(log_decay.shape) < 0.2
            log_decay -= is_here * rng.exponential(100, log_decay.shape)
        others = jax.tree.map(jnp.float32, (log_decay, beta, state))
        operands = *(jnp.asarray(x, dtype) for x in qkv), *others
        # As the kernel gets it: a gradient in bfloat16, like the result.
        ahead = jnp.asarray(ahead[0], dtype), jnp.float32(ahead[1])
        with jax.enable_x64():
            wide = jax.tree.map(lambda x: x.astype(jnp.float64), (operands, ahead))
            wanted = by_tokens(wide[0], is_first, wide[1])
        for number, run in enumerate(in_turn):
            squares[number] += squared_errors(run(operands, is_first, ahead), wanted)
    ours, theirs = np.sqrt(squares)
    assert (ours <= 2 * theirs).all(), dict(zip(NAMES, ours / theirs, strict=True))


@pytest.mark.thorough(quick=1)
def test_no_chunk_races_or_reads_what_nobody_wrote(rng, capfd):
    """With memory full of nan: a state stays in VMEM over chunks, rows and heads."""
    operands, is_first, ahead = problem(rng, 2 * CHUNK + 3, (2, 4), True)
    operands, ahead = jax.tree.map(jnp.float32, (operands, list(ahead)))
    memory = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    got = compiled(interpreted(memory))(operands, is_first, ahead)
    want = compiled(in_xla)(operands, is_first, ahead)
    for name, x, y in zip(NAMES, got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4, err_msg=name)
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout, ring, slices", [(Zigzag(), 2, 1), (Contiguous(), 1, 2)]
)
def test_rings_of_kernels_give_what_tokens_give_one_by_one(layout, ring, slices, rng):
    """The maps of runs, which do not fill their chunks, and documents in them."""
    check_ring(layout, ring, slices, rng, implementation=interpreted())


@pytest.mark.parametrize("size", [8, 64, 128])
def test_inverses_of_equal_keys_do_not_cancel(size, rng):
    """Powers of such a system have 10^30 in them, its inverse has no more than 1."""
    equal = np.tri(size, k=-1)
    systems = equal, equal * rng.random((size, size))
    solved = jax.jit(inverses)([jnp.float32(x) for x in systems])
    for x, system in zip(solved, systems, strict=True):
        want = np.linalg.inv(np.eye(size) + np.float32(system).astype(float))
        assert abs(x - want).max() <= 1e-6 * abs(want).max()


def test_kernels_are_taken_for_known_heads_on_known_tpus(monkeypatch):
    keys = 2, 1, 256, 16, 128  # (rows, runs, T, K, D)
    for kind in tpu.KINDS:
        monkeypatch.setattr(tpu, "device_kind", lambda kind=kind: kind)
        assert tpu.best(keys, 128, jnp.bfloat16) is launch.gated_delta
        assert tpu.best(keys, 128, jnp.float16) is None
        assert tpu.best(keys, 96, jnp.bfloat16) is None
        assert tpu.best((2, 1, 63, 16, 128), 128, jnp.bfloat16) is None
    for kind in ("TPU v4", "cpu", "NVIDIA H200"):
        monkeypatch.setattr(tpu, "device_kind", lambda kind=kind: kind)
        assert tpu.best(keys, 128, jnp.bfloat16) is None


@pytest.mark.slow
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
def test_the_compiler_takes_the_kernels(chip, depth):
    mesh = jax.sharding.Mesh(np.array(tpu_devices(chip)[:1]), ("ring",))

    def total(*operands: jax.Array) -> jax.Array:
        out, state = launch.gated_delta(*operands)
        return out.sum(dtype=jnp.float32) + state.sum()

    like = jax.ShapeDtypeStruct
    keys = like((1, 256, 1, depth), jnp.bfloat16)
    gates = like((1, 256, 2), jnp.float32)
    compiled = compile_for(
        mesh,
        jax.grad(total, argnums=(0, 1, 2, 3, 4, 6)),
        *(keys, keys, like((1, 256, 2, depth), jnp.bfloat16), gates, gates),
        *(like((1, 256), jnp.bool_), like((1, 2, depth, 2 * depth), jnp.float32)),
    )
    assert compiled.as_text().count("tpu_custom_call") == 2
