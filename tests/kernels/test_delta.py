"""Gated DeltaNet in chunks and over rings, against one token after the other."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels.delta.attention import make_delta_attention
from kernels.delta.rule import CHUNK, EPSILON
from kernels.delta.runs import SAVED, Runs
from kernels.delta.states import CYCLES, Cycles, States
from kernels.devices import chips
from kernels.layouts import (
    Contiguous,
    Layout,
    Mirror,
    Striped,
    Zigzag,
    divisor,
    order,
    permute,
    unpermute,
)
from tests.kernels.test_ring_transfers import permuted_shapes

ROWS, TOKENS, KEY_HEADS, HEADS, DEPTH, VALUES, WIDTH = 2, 160, 2, 4, 6, 5, 4
SIZES = (KEY_HEADS, DEPTH), (KEY_HEADS, DEPTH), (HEADS, VALUES)
FIRST = [[0, 1, 127, 128, 130, 150], [-7, *range(150, TOKENS)]]
"""First tokens of the rows' documents: some shorter than the convolution, one of a
document that began before its row; padding is documents of one token."""
ZEROS = 140
"""Tokens of the second row from here on are zeros."""
EPSILON_OF_NORM = 1e-6
NAMES = "out state q k v q_kernel k_kernel v_kernel log_decay beta".split()
DRAWS = 4
"""One draw's error may be that of a few numbers."""


def problem(rng: np.random.Generator) -> tuple[Any, np.ndarray, np.ndarray]:
    """Operands, positions, and what the result is multiplied with."""
    draw = rng.standard_normal
    qkv = tuple(draw((ROWS, TOKENS, *size)) for size in SIZES)
    for x in qkv:
        x[1, ZEROS:] = 0
    kernels = tuple(draw((WIDTH, *size)) for size in SIZES)
    log_decay = -rng.exponential(0.1, (ROWS, TOKENS, HEADS))
    beta = rng.random((ROWS, TOKENS, HEADS))
    index = np.arange(TOKENS, dtype=np.int32)
    ends = [np.searchsorted(first, index, "right") - 1 for first in FIRST]
    starts = [np.array(f, np.int32)[e] for f, e in zip(FIRST, ends, strict=True)]
    ahead = draw((ROWS, TOKENS, HEADS, VALUES))
    return (qkv, kernels, log_decay, beta), index - np.stack(starts), ahead


def shapes(tokens: int) -> tuple:
    """Those of operands, qkv in bfloat16, and positions."""

    def like(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = ROWS, tokens
    qkv = tuple(like(*rows, *size, dtype=jnp.bfloat16) for size in SIZES)
    kernels, gate = tuple(like(WIDTH, *size) for size in SIZES), like(*rows, HEADS)
    return qkv, kernels, gate, gate, like(*rows, dtype=jnp.int32)


def token_by_token(operands: Any, positions: Any) -> tuple[jax.Array, jax.Array]:
    """The rule as it is written, in the operands' type."""
    qkv, kernels, log_decay, beta = operands

    def convolved(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = sum(
            jnp.where((positions >= n)[..., None, None], before(x, n), 0) * w
            for n, w in enumerate(kernel[::-1])
        )
        return jax.nn.silu(y)

    def before(x: jax.Array, n: int) -> jax.Array:
        return jnp.pad(x, [(0, 0), (n, 0), (0, 0), (0, 0)])[:, :TOKENS]

    q, k, v = map(convolved, qkv, kernels)
    q, k = (
        jnp.repeat(x / jnp.sqrt((x**2).sum(-1, keepdims=True) + EPSILON), 2, axis=2)
        for x in (q, k)
    )
    q = q * DEPTH**-0.5

    def step(state: jax.Array, token: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, log_decay, beta, is_first = token
        state = jnp.exp(log_decay)[..., None, None] * state
        state = jnp.where(is_first[:, None, None, None], 0, state)
        new = beta[..., None] * (v - jnp.einsum("bhdv,bhd->bhv", state, k))
        state += jnp.einsum("bhd,bhv->bhdv", k, new)
        return state, jnp.einsum("bhdv,bhd->bhv", state, q)

    tokens = q, k, v, log_decay, beta, positions == 0
    state = jnp.zeros((ROWS, HEADS, DEPTH, VALUES), q.dtype)
    over_tokens = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), tokens)
    state, out = jax.lax.scan(step, state, over_tokens)
    return jnp.swapaxes(out, 0, 1), state


def ring_mesh(ring: int, slices: int = 1) -> Mesh:
    devices = np.array(jax.devices()[: ring * slices]).reshape(ring, slices)
    return Mesh(devices, ("ring", "ulysses"))


def compiled(function: Callable) -> Callable[..., list[np.ndarray]]:
    """Returns a function of operands, positions and ahead, with results as NAMES.

    Gradients are those behind the norm that a layer has there.
    """

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def run(operands: Any, positions: Any, ahead: Any) -> tuple[jax.Array, Any]:
        out, state = function(operands, positions)
        square = jnp.square(out).mean(axis=-1, keepdims=True)
        normal = out * jax.lax.rsqrt(square + EPSILON_OF_NORM)
        return (normal * ahead).sum(), (out, state)

    def answer(*arguments: Any) -> list[np.ndarray]:
        (_, results), gradients = jax.device_get(run(*arguments))
        return jax.tree.leaves((results, gradients))

    return answer


by_tokens = compiled(token_by_token)


def squared_errors(got: list[np.ndarray], wanted: list[np.ndarray]) -> np.ndarray:
    """Returns those of each array, relative to its norm."""
    squares = []
    for number, (x, want) in enumerate(zip(got, wanted, strict=True)):
        assert np.isfinite(x).all(), number
        squares.append((np.linalg.norm(x - want) / np.linalg.norm(want)) ** 2)
    return np.array(squares)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout, ring, slices",
    [
        pytest.param(Contiguous(), 1, 1, marks=pytest.mark.quick),
        pytest.param(Zigzag(), 2, 1, marks=pytest.mark.quick),
        (Zigzag(), 4, 1),
        (Striped(5), 8, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (Contiguous(), 5, 1),
                (Contiguous(), 2, 2),
                (Zigzag(), 2, 4),
                (Striped(10), 4, 1),
            )
        ),
    ],
    ids=str,
)
def test_rings_give_what_tokens_give_one_by_one(layout, ring, slices, rng):
    """Results, state, and all gradients, through heads of zeros too."""
    check_ring(layout, ring, slices, rng)


def check_ring(
    layout: Layout, ring: int, slices: int, rng: np.random.Generator, **options: Any
) -> None:
    """Compares a ring with one token after the other. options: of the mixing.

    Against float64: at most twice the error of one token after the other in float32.
    """
    order = functools.partial(permute, layout=layout, ring_size=ring)
    mix = make_delta_attention(
        ring_mesh(ring, slices), layout=layout, ulysses_axis="ulysses", **options
    )

    def in_ring(operands: Any, positions: Any) -> Any:
        qkv, kernels, *rest = operands
        placed = tuple(map(order, qkv)), kernels, *map(order, rest), order(positions)
        out, state = mix(*placed, with_state=True)
        return unpermute(out, layout, ring), state

    in_turn = compiled(in_ring), by_tokens
    squares = np.zeros((len(in_turn), len(NAMES)))
    for _ in range(DRAWS):
        operands, positions, ahead = problem(rng)
        operands, ahead = jax.tree.map(np.float32, (operands, ahead))
        with jax.enable_x64():
            wide = jax.tree.map(np.float64, (operands, ahead))
            wanted = by_tokens(wide[0], positions, wide[1])
        for number, run in enumerate(in_turn):
            squares[number] += squared_errors(run(operands, positions, ahead), wanted)
    ours, theirs = np.sqrt(squares / DRAWS)
    ratios = dict(zip(NAMES, np.round(ours / theirs, 1).tolist(), strict=True))
    assert (ours <= 2 * theirs + 1e-6).all(), ratios


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("ring", [1, 2])
def test_segments_give_what_tokens_do_in_less_memory(ring, rng):
    """Of 33 tokens, which do not divide a run's 160 or 80."""
    check_ring(Contiguous(), ring, 1, rng, segment=33)
    operands, positions, ahead = jax.tree.map(np.float32, problem(rng))
    held = []
    for segment in (0, 33):
        build = functools.partial(make_delta_attention, layout=Contiguous())
        mix = build(ring_mesh(ring), segment=segment)

        def total(operands: Any, mix: Any = mix) -> jax.Array:
            return (mix(*operands, np.int32(positions)) * ahead).sum()

        program = jax.jit(jax.value_and_grad(total)).lower(operands).compile()
        held.append(program.memory_analysis().temp_size_in_bytes)
    assert held[1] < 0.7 * held[0]


@pytest.mark.parametrize(
    "layout, ring, slices, said",
    [
        (Striped(), 4, 1, "runs of 1 tokens .* reads 3 before .*attention=zigzag"),
        (Striped(2), 4, 1, "runs of 2 tokens .* or a wider stripe_granule"),
        (Zigzag(), 8, 1, "does not divide into 8 shards"),
    ],
    ids=str,
)
def test_runs_that_cannot_be_are_refused(layout, ring, slices, said):
    mix = make_delta_attention(
        ring_mesh(ring, slices), layout=layout, ulysses_axis="ulysses"
    )
    with pytest.raises(ValueError, match=said):
        jax.eval_shape(mix, *shapes(40))


def test_unknown_implementations_are_refused():
    with pytest.raises(ValueError, match="implementation='cuda' is not one of"):
        make_delta_attention(ring_mesh(1), layout=Contiguous(), implementation="cuda")


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
@pytest.mark.parametrize(
    "layout, ring, slices, slots, moves",
    [
        (Contiguous(), 3, 1, 1, 1),
        (Zigzag(), 4, 1, 2, 3),
        (Zigzag(), 2, 4, 1, 1),
        (Striped(4), 3, 1, 4, 2),
        (Striped(2), 4, 3, 2, 4),
    ],
    ids=str,
)
def test_runs_move_in_the_order_of_their_tokens(
    layout, ring, slices, slots, moves, steps
):
    runs = Runs.of(layout, ring, 48, slices)
    index = order(layout, ring, 48).reshape(ring * slices, slots, -1)
    assert runs.slots == slots and runs.length == index.shape[-1]
    got = np.full_like(index, -1)
    found = runs.moves(steps)
    for pairs, source, target in found:
        for a, b in pairs:
            assert (got[b, target] == -1).all()
            got[b, target] = index[a, source]
    np.testing.assert_array_equal(got, (index - steps * runs.length).clip(-1))
    assert len(found) <= moves


def shapes_of_runs() -> Iterator[tuple[Layout, int, int, int]]:
    """Layouts, rings, slices and tokens: also slices that cut stripes."""
    stripes = [Striped(granule) for granule in (1, 2, 3, 4, 6, 12)]
    for layout, ring, slices, times in itertools.product(
        [Contiguous(), Zigzag(), Mirror(), *stripes],
        [1, 2, 3, 4, 5, 8],
        [1, 2, 3, 5],
        [1, 2, 3, 5],
    ):
        tokens = times * divisor(layout, ring, slices)
        if tokens <= 360:
            yield layout, ring, slices, tokens


def test_every_move_hands_each_run_to_the_one_some_steps_later():
    """Slots that are sent, and slots that receive, are those of one run each."""
    checked = 0
    for layout, ring, slices, tokens in shapes_of_runs():
        runs = Runs.of(layout, ring, tokens, slices)
        rank = np.zeros((runs.devices, runs.slots), int)
        for number, place in enumerate(runs.owners):
            rank[place] = number
        for steps in sorted({1, 2, *runs.shifts}):
            got = np.zeros_like(rank)
            for pairs, source, target in runs.moves(steps):
                for a, b in pairs:
                    got[b, target] += rank[a, source] + 1
            want = (rank + 1 - steps).clip(0)
            shape = f"{layout}, ring {ring}, {slices} slices, {tokens} tokens, {steps}"
            np.testing.assert_array_equal(got, want, err_msg=shape)
            checked += 1
    assert checked > 1000


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("ring", [1, 2])
def test_a_convolution_of_one_token_reads_none_before(ring, rng):
    """Its result is that of a kernel of two tokens whose first one is 0."""
    (qkv, kernels, *gates), positions, _ = problem(rng)
    last = tuple(np.float32(kernel[-1:]) for kernel in kernels)
    padded = tuple(np.concatenate([0 * kernel, kernel]) for kernel in last)
    operands = jax.tree.map(np.float32, (qkv, gates))
    mix = jax.jit(make_delta_attention(ring_mesh(ring), layout=Contiguous()))
    got, want = (
        mix(operands[0], kernel, *operands[1], positions) for kernel in (last, padded)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "layout, ring, maps, tails, most",
    [
        (Contiguous(), 4, 3, 1, (3, 1)),
        (Contiguous(), 8, 4, 1, (4, 1)),
        (Zigzag(), 8, 13, 3, (9, 2)),
    ],
)
def test_what_is_sent_does_not_grow_with_the_tokens(layout, ring, maps, tails, most):
    """Maps in 1 + log2(runs - 1) steps, and three tokens of the run before.

    Each once forward and its gradient once backward. In zigzag first runs go up the
    ring, second ones down, and the last first ones over: `most` maps and tails of a
    device a pass, as the planner counts.
    """
    mix, sent = make_delta_attention(ring_mesh(ring), layout=layout), []

    # A layer that keeps what is named is recomputed without sending.
    keep = jax.checkpoint_policies.save_only_these_names(SAVED)

    def total(*operands: Any) -> jax.Array:
        out = jax.checkpoint(mix, policy=keep)(*operands)
        return jnp.square(out.astype(jnp.float32)).sum()

    for tokens in (64, 1024):
        forward, both = (
            jax.jit(function).lower(*shapes(tokens)).as_text()
            for function in (mix, jax.grad(total, argnums=(0, 1, 2, 3)))
        )
        assert "all_reduce" not in forward
        sent.append([sorted(permuted_shapes(text)) for text in (forward, both)])
    state = [f"{ROWS}x1x{HEADS}x{DEPTH}x{VALUES + DEPTH}xf32"]
    token = [f"{ROWS}x1x{WIDTH - 1}x{h}x{d}xbf16" for h, d in SIZES]
    assert sent == [[sorted(n * (maps * state + tails * token)) for n in (1, 2)]] * 2
    tail = 2 * (WIDTH - 1) * sum(h * d for h, d in SIZES)
    runs = Runs.of(layout, ring, 1024)
    planned = States(runs, ROWS, HEADS, DEPTH, VALUES, tail)
    size = 4 * ROWS * HEADS * DEPTH * (VALUES + DEPTH)
    assert planned.sent() == most[0] * size + most[1] * ROWS * tail


def test_products_of_states_are_counted_and_timed():
    """A token: q k, k k, half a solve, decays, three products with the state."""
    alone, ring = (
        States(Runs.of(Contiguous(), n, 256 * n), 1, 2, 6, 5, 0) for n in (1, 4)
    )
    token = 2 * CHUNK * 6 + CHUNK * 11 / 2 + CHUNK**2 + 3 * 6 * 5 + CHUNK * 5
    assert alone.flops == 2 * 2 * 256 * token and alone.sent() == 0
    more = 3 * 6 * 6 + CHUNK * 6 + 6 * 5  # columns of a map, and what is read of states
    assert ring.flops == 2 * 2 * (256 * (token + more) + 2 * 6 * 6 * 11)
    chip = chips.find("TPU v5e")
    # Maps go by 1, 1 and 2 devices, four over each link.
    sent = 4 * 4 * 2 * 6 * 11 / chip.interconnect_bytes_per_second
    assert ring.sending(chip) == sent
    # Six passes of a TPU, of which XLA's program reaches a fifth.
    products = 6 / 0.2 * ring.flops / chip.peak_flops
    assert ring.computing(chip) == pytest.approx((products, 2 * products))


def test_the_rule_takes_the_cycles_of_its_chunks(monkeypatch):
    """32 heads, 64 chunks; of half of a head's columns, by the products."""
    runs = Runs.of(Contiguous(), 2, 2 * 64 * CHUNK)
    chip = chips.find("TPU7x")
    rate = chip.bundles_per_second
    monkeypatch.setitem(CYCLES, "TPU7x", Cycles(1000, 3000))
    heads = States(runs, 1, 32, 128, 128, 0)
    seconds = 32 * 64 * np.array([1000, 3000]) / rate
    np.testing.assert_allclose(heads.computing(chip), seconds)
    waiting = heads.computing(chips.stalled(chip))
    factors = [dict(chips.STALLS["TPU7x"])[name][0] for name in ("forward", "backward")]
    np.testing.assert_allclose(waiting, seconds * factors)
    narrow = States(runs, 1, 32, 128, 64, 0)
    share = narrow.flops / heads.flops
    np.testing.assert_allclose(narrow.computing(chip), share * seconds)


@pytest.mark.thorough
def test_strong_decays_keep_their_digits(rng):
    """As exactly as one token after the other, where sums of decays are large."""
    operands, positions, _ = problem(rng)
    operands = *operands[:2], 300 * operands[2], operands[3]
    one_by_one = jax.jit(functools.partial(token_by_token, positions=positions))
    with jax.enable_x64():
        wanted = jax.device_get(one_by_one(operands)[0])
    operands = jax.tree.map(np.float32, operands)
    mix = make_delta_attention(ring_mesh(1), layout=Contiguous())
    off = (
        abs(x - wanted) for x in (mix(*operands, positions), one_by_one(operands)[0])
    )
    ours, theirs = (np.linalg.norm(x / np.abs(wanted).mean()) for x in off)
    assert ours < 1.5 * theirs
