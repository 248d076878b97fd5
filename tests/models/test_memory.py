"""What layers keep and recompute, in which chunks: one training in less memory."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.memory import (
    REMAT_POLICIES,
    Device,
    Execution,
    Kept,
    choose_chunk,
    scan_chunks,
)
from models.sizes import DecoderConfig
from tasks.text import TextRun
from tests.small_llama import BATCH_ROWS, LENGTH, Run, assert_same, rows
from training.mesh import MeshShape

TOKENS = 13


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_chunks_give_what_the_whole_gives_with_its_gradients(chunk, rng):
    shapes = (TOKENS, 2, 5), (5, 7), (TOKENS, 7)
    x, w, ahead = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes)
    numbers = jnp.arange(TOKENS, dtype=jnp.int32)

    def mapped(tokens, w):
        x, numbers = tokens
        return jnp.tanh(x.sum(axis=1) @ w) * (numbers % 3)[:, None].astype(x.dtype)

    def whole(x, w):
        return (ahead * mapped((x, numbers), w)).sum(), mapped((x, numbers), w)

    def chunked(x, w):
        y = scan_chunks(lambda part: mapped(part, w), (x, numbers), chunk)
        return (ahead * y).sum(), y

    found = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(x, w)
        for f in (chunked, whole)
    )
    for got, want in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_gradient_holds_one_chunk_of_the_wide_values():
    tokens, narrow, wide = 2048, 8, 1024

    def loss(x, w, chunk):
        y = scan_chunks(lambda part: jnp.tanh(part @ w) @ w.T, x, chunk)
        return jnp.square(y).sum()

    def temporary_bytes(chunk):
        gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        lowered = gradient.lower(
            jnp.ones((tokens, narrow)), jnp.ones((narrow, wide)), chunk
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    all_wide = 4 * tokens * wide
    assert temporary_bytes(tokens) >= all_wide
    assert temporary_bytes(64) < all_wide / 8


V5E = Device(16 * 2**30, 197e12 / 819e9)
V6E = Device(32 * 2**30, 918e12 / 1638e9)
LOGITS, WIDE = 8 * 128_256, 6 * 2 * 14_336
"""Bytes of a token of LLaMA 3 8B, with gradients: logits, and the feed-forward's."""


@pytest.mark.parametrize(
    ("tokens", "token_bytes", "device", "chunk"),
    [
        (16_384, LOGITS, V6E, 2048),  # as many as a sixteenth of 32 GiB holds
        (16_384, WIDE, V6E, 8192),  # more would save little
        (16_384, WIDE, V5E, 4096),
        (2**20, WIDE, V6E, 8192),
        (1500, WIDE, V6E, 1500),
        (16_384, LOGITS, V5E, 1024),
        (3 * 4096, WIDE, V5E, 4096),
        (5 * 2000, WIDE, V5E, 2500),  # divides; 4096 would have padding
        (9973, WIDE, V5E, 4096),  # a prime
        (16_384, LOGITS, None, 1024),
        (100, LOGITS, None, 100),
        (0, LOGITS, V5E, 1),
    ],
)
def test_chunks_are_chosen_by_traffic_and_memory(tokens, token_bytes, device, chunk):
    assert choose_chunk(tokens, token_bytes, device) == chunk


SIZES = DecoderConfig(
    hidden_size=64,
    feed_forward_size=160,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
KEPT = Kept(SIZES, tokens=100, tensor=2, itemsize=2)
INPUT, RESULT = 100 * 64 * 2, 100 * (2 * 16 * 2 + 2 * 4)
PRODUCTS = 100 * 2 * ((2 + 2) * 16 + 64 + 2 * 80)


def test_policies_keep_inputs_results_and_products():
    kept = [KEPT.of_layer(p) for p in ("nothing", "offload", "attention", "products")]
    assert kept == [INPUT, INPUT, INPUT + RESULT, INPUT + RESULT + PRODUCTS]
    in_chunks = Kept(SIZES, 100, 2, 2, feed_forward_chunk=50)
    without = PRODUCTS - 100 * 2 * 2 * 80
    assert in_chunks.of_layer("products") == INPUT + RESULT + without
    for norms in ("after", "both"):  # which need down's product in the backward
        sizes = dataclasses.replace(SIZES, norms=norms)
        kept = [
            dataclasses.replace(one, sizes=sizes).of_layer("products")
            - one.of_layer("products")
            for one in (KEPT, in_chunks)
        ]
        assert kept == [100 * 64 * 2, 0]


@pytest.mark.parametrize(
    ("policy", "budget", "found"),
    [
        ("nothing", 0, [("nothing", 6)]),
        ("nothing", RESULT - 1, [("nothing", 6)]),
        ("nothing", RESULT, [("nothing", 5), ("attention", 1)]),
        ("nothing", 6 * RESULT - 1, [("nothing", 1), ("attention", 5)]),
        ("nothing", 6 * RESULT, [("attention", 6)]),
        ("nothing", 6 * RESULT + PRODUCTS, [("attention", 5), ("products", 1)]),
        ("attention", 2.9 * PRODUCTS, [("attention", 4), ("products", 2)]),
        ("attention", 6 * PRODUCTS, [("products", 6)]),
        ("attention", 2**60, [("products", 6)]),
        ("products", 2**60, [("products", 6)]),
        ("tail", RESULT, [("tail", 4), ("attention", 2)]),
        ("offload", 0, [("offload", 6)]),
    ],
)
def test_layers_climb_one_by_one_within_the_budget(policy, budget, found):
    assert KEPT.climb(policy, budget) == found


@pytest.mark.parametrize("policy", ["nothing", "tail", "attention"])
def test_a_budget_of_so_many_steps_lets_them_climb(policy):
    layers, rungs = SIZES.num_layers, KEPT.rungs(policy)
    assert KEPT.budget(policy, 0) == 0
    for steps in range(1, layers * len(rungs) + 1):
        climbed = KEPT.climb(policy, float(f"{KEPT.budget(policy, steps):.4g}"))
        kept = sum(count * KEPT.of_layer(p) for p, count in climbed)
        whole, rest = divmod(steps, layers)
        more = layers * sum(rungs[:whole]) + (rest and rest * rungs[whole])
        assert kept == layers * KEPT.of_layer(policy) + more


def run_with_budget(steps: int, **fields: Any) -> Run:
    """As many steps up the ladder."""
    chunks = dict.fromkeys(("feed_forward_chunk_tokens", "loss_chunk_tokens"), 0)
    fields |= {"remat": "nothing"} | chunks
    run = Run(MeshShape(), "striped", **fields)
    budget = TextRun(run.config, run.partition).kept.budget("nothing", steps) / 2**30
    return Run(MeshShape(), "striped", remat_budget_gib=budget, **fields)


def settings(run: Run) -> Execution:
    return TextRun(run.config, run.partition).execution


def test_settings_of_a_budget_are_chosen_and_said():
    run = run_with_budget(4, model__num_layers=3)
    tokens = TextRun(run.config, run.partition).kept.tokens
    end = f"products, feed-forward of all tokens; logits of {tokens} tokens at a time"
    begin = f"remat attention, feed-forward of {tokens} tokens at a time; last 1 layers"
    assert str(settings(run)) == f"{begin} {end}"
    assert str(settings(run_with_budget(4))) == f"remat {end}"


ONE_DEVICE = MeshShape()


def run_with(policy: str, shape: MeshShape = ONE_DEVICE, **overrides: Any) -> Run:
    """One chunk of the feed-forward holds all tokens: smaller ones are recomputed."""
    chunks = {"feed_forward_chunk_tokens": BATCH_ROWS * LENGTH, "loss_chunk_tokens": 16}
    return Run(shape, "striped", remat=policy, **chunks | overrides)


@pytest.mark.thorough
def test_a_budget_changes_neither_loss_nor_gradients():
    run = run_with_budget(3)
    assert "last 1 layers" in str(settings(run))
    assert_same(run.answer(), answer("everything"), 1e-5)


@functools.cache
def answer(policy: str) -> tuple[np.ndarray, Any]:
    """Loss and gradients on one device."""
    return run_with(policy).answer()


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "policy",
    [
        # On one device and a CPU it is "nothing", but for the name.
        pytest.param(name, marks=[pytest.mark.slow] * (name == "offload"))
        for name in REMAT_POLICIES
        if name != "everything"
    ],
)
def test_every_policy_gives_the_same_loss_and_gradients(policy):
    assert_same(answer(policy), answer("everything"), 1e-6)


def trace(policy: str, ring_size: int = 1, **overrides: Any) -> jax.stages.Traced:
    """Of loss and gradients, as the train step takes them."""
    run = run_with(policy, MeshShape(ring=ring_size), **overrides)
    arguments = run.model.shapes, jax.tree.map(jnp.asarray, rows())
    step = jax.jit(jax.value_and_grad(run.loss))
    return step.trace(*arguments, run.model.frozen_shapes)


@pytest.mark.thorough(quick=2)
@pytest.mark.parametrize("policy", REMAT_POLICIES)
def test_ring_runs_again_only_where_its_result_is_not_kept(policy):
    """Of "tail", the ring of half of the keys, which is beside the whole one before."""
    ring_size, runs = 4, {"nothing": 2, "offload": 2, "tail": 3}.get(policy, 1)
    program = trace(policy, ring_size).lower().as_text()
    rotations = len(re.findall(r"stablehlo\.collective_permute", program))
    # The layers are a loop, so each is there once: keys and values, then those and
    # their gradients, which have to come home.
    forward, backward = 2 * (ring_size - 1), 2 * (ring_size - 1) + 2 * ring_size
    assert rotations == runs * forward + backward


def products(policy: str, **overrides: Any) -> int:
    """Matrix products in a step's program, the layers being a loop."""
    program = trace(policy, **overrides).lower().as_text()
    return len(re.findall(r"stablehlo\.dot_general", program))


@pytest.mark.thorough
def test_policies_recompute_the_products_that_they_do_not_keep():
    # With parameters: query, key, value, output, gate, up, down, and two of each in
    # the backward. Attention: 2, and 6 in its backward. Loss: logits, again, and 2.
    kept = 3 * 7 + 2 + 6 + 4
    assert products("everything") == kept
    assert products("products") == kept
    # The last product of a layer is never needed again.
    assert products("attention") == kept + 6
    # Attention, and once more queries, keys and values.
    assert products("nothing") == kept + 6 + 2 + 3
    # The same, and the attention of the last half of the tokens only once.
    assert products("tail") == products("nothing") + 2


def test_norms_after_do_not_compute_chunks_of_the_feed_forward_again():
    chunks = {"feed_forward_chunk_tokens": 16}
    before = products("attention", **chunks)
    # But for each chunk's last product, of which the norm's gradient is made.
    assert products("attention", model__norms="both", **chunks) == before + 1


@pytest.mark.thorough
def test_norms_after_chunks_have_the_gradients_of_all_tokens():
    shape = MeshShape(fsdp=2, tensor=2)
    got, want = (
        run_with("attention", where, model__norms="both", feed_forward_chunk_tokens=n)
        for where, n in ((shape, 7), (ONE_DEVICE, 0))
    )
    assert_same(got.answer(), want.answer(), 1e-5)


def test_offload_moves_the_layers_input_to_the_host_and_back():
    def placements(policy: str) -> list[str]:
        # On a CPU all memory is the host's, and nothing is moved.
        lowered = trace(policy, 2).lower(lowering_platforms=("tpu",))
        return re.findall(r'_xla_buffer_placement = "(\w+)"', lowered.as_text())

    assert placements("offload") == ["pinned_host", "device"]
    assert placements("attention") == []
