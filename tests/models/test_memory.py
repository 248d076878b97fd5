"""What layers keep and recompute, in which chunks: one training in less memory."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.chunks import Device, choose_chunk, feed_forward_bytes
from models.memory import REMAT_POLICIES, Execution, Kept
from models.sizes import DecoderConfig
from tests.cases import table
from tests.small.models import (
    BATCH_ROWS,
    LENGTH,
    Run,
    assert_same,
    budget_gib,
    rows,
)
from training.sharding.mesh import MeshShape

DEVICES = {
    "v5e": Device(16 * 2**30, 197e12 / 819e9),
    "v6e": Device(32 * 2**30, 918e12 / 1638e9),
    None: None,
}
BYTES = {"logits": 8 * 128_256, "wide": 6 * 2 * 14_336}


@pytest.mark.parametrize(
    "tokens, of_token, device, chunk", table("models.txt", "chunk")
)
def test_chunks_are_chosen_by_traffic_and_memory(tokens, of_token, device, chunk):
    assert choose_chunk(tokens, BYTES[of_token], DEVICES[device]) == chunk


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


def test_hybrids_keep_the_mean_of_their_layers():
    """Of Gated DeltaNet the results of its value heads, and its own projections."""
    delta = dict(delta_key_heads=2, delta_value_heads=4, delta_key_dim=6)
    delta |= dict(delta_value_dim=5, delta_convolution=4, layer_pattern="ddf")
    kept = dataclasses.replace(KEPT, sizes=dataclasses.replace(SIZES, **delta))
    result = 100 * 2 * 10
    products = 100 * 2 * (12 + 10 + 10 + 4 + 64 + 2 * 80)
    policies = "nothing", "attention", "products"
    means = []
    for own, other in ((0, 0), (result, RESULT), (products, PRODUCTS)):
        means.append((2 * own + other) // 3)
    got = [kept.of_layer(policy) for policy in policies]
    np.testing.assert_allclose(np.diff([INPUT, *got]), means, atol=1)


def test_first_layers_without_experts_keep_their_own_products():
    sizes = {"experts": 4, "experts_per_token": 2, "feed_forward_size": 20}
    sizes |= {"dense_layers": 2, "dense_feed_forward_size": 160}
    sizes = dataclasses.replace(SIZES, **sizes)
    products = dataclasses.replace(KEPT, sizes=sizes).of_layer("products")
    of_experts = 100 * 2 * ((2 + 2) * 16 + 64 + 4 // 2)  # and of the router
    assert products - INPUT - RESULT == (2 * PRODUCTS + 4 * of_experts) // 6
    assert feed_forward_bytes(sizes, 2) == 2 * 6 * 160
    wide = dataclasses.replace(sizes, experts_per_token=4)
    assert feed_forward_bytes(wide, 2) == 2 * 4 * (6 * 20 + 4 * 64)


@pytest.mark.parametrize("policy, budget, found", table("models.txt", "climb"))
def test_layers_climb_one_by_one_within_the_budget(policy, budget, found):
    assert KEPT.climb(policy, np.dot(budget, (RESULT, PRODUCTS, 1))) == found


def test_parameters_are_kept_where_they_are_gathered():
    sharded = dataclasses.replace(KEPT, gathered=1000)
    kept = [sharded.of_layer(p) for p in ("products", "gathered", "everything")]
    assert kept == [INPUT + RESULT + PRODUCTS + n for n in (0, 1000, 1000)]
    found = sharded.climb("attention", 6 * PRODUCTS + 1999)
    assert found == [("products", 5), ("gathered", 1)]
    many = dataclasses.replace(sharded, tokens=2049)
    assert many.ladder("nothing") == ["nothing", "attention", "products"]


def test_layers_that_keep_more_are_the_last_of_all_in_any_part_of_them():
    last = Execution(jnp.dtype("float32"), "products")
    run = Execution(jnp.dtype("float32"), "attention", last_layers=(last, 2))
    assert run.runs(5) == [(run, 3), (last, 2)]
    assert run.runs(5, stop=2) == [(run, 2)]
    assert run.runs(5, stop=4) == [(run, 3), (last, 1)]
    assert run.runs(5, first=2) == [(run, 1), (last, 2)]
    assert run.runs(5, first=4) == [(last, 1)]
    assert last.runs(5, first=1) == [(last, 4)]


def run_with_budget(steps: int, **fields: Any) -> Run:
    """As many steps up the ladder."""
    chunks = dict.fromkeys(("feed_forward_chunk_tokens", "loss_chunk_tokens"), 0)
    fields |= {"remat": "nothing"} | chunks
    run = Run(MeshShape(), "striped", **fields)
    budget = budget_gib(run.resolved.kept, "nothing", steps)
    return Run(MeshShape(), "striped", remat_budget_gib=budget, **fields)


def test_settings_of_a_budget_are_chosen_and_said():
    run = run_with_budget(4, model__num_layers=3)
    tokens = run.resolved.kept.tokens
    end = f"products, feed-forward of all tokens; logits of {tokens} tokens at a time"
    begin = f"remat attention, feed-forward of {tokens} tokens at a time; last 1 layers"
    assert str(run.resolved.execution) == f"{begin} {end}"
    assert str(run_with_budget(4).resolved.execution) == f"remat {end}"


ONE_DEVICE = MeshShape()


def run_with(policy: str, shape: MeshShape = ONE_DEVICE, **overrides: Any) -> Run:
    """One chunk of the feed-forward holds all tokens: smaller ones are recomputed."""
    chunks = {"feed_forward_chunk_tokens": BATCH_ROWS * LENGTH, "loss_chunk_tokens": 16}
    return Run(shape, "striped", remat=policy, **chunks | overrides)


@pytest.mark.thorough
def test_a_budget_changes_neither_loss_nor_gradients():
    run = run_with_budget(3)
    assert "last 1 layers" in str(run.resolved.execution)
    assert_same(run.answer(), answer("everything"), 1e-5)


@functools.cache
def answer(policy: str) -> tuple[np.ndarray, Any]:
    """Loss and gradients on one device."""
    return run_with(policy).answer()


@pytest.mark.thorough
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


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize("policy", REMAT_POLICIES)
def test_ring_runs_again_only_where_its_result_is_not_kept(policy):
    ring_size, runs = 4, {"nothing": 2, "offload": 2}.get(policy, 1)
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


@pytest.mark.parametrize("permutes", [False, True])
def test_kept_parameters_are_gathered_once(permutes):
    def gathers(policy: str) -> int:
        fields = {"remat": policy, "feed_forward_chunk_tokens": 0}
        run = Run(MeshShape(ring=4), "striped", permutes=permutes, **fields)
        return len(re.findall(r"stablehlo\.all_gather", run.lowered.as_text()))

    # The layers are a loop; and embedding and head.
    assert [gathers(p) for p in ("products", "gathered")] == [2 * 7 + 2, 7 + 2]


@pytest.mark.thorough
def test_kept_parameters_have_the_same_gradients():
    run = run_with("gathered", MeshShape(fsdp=2, tensor=2))
    assert_same(run.answer(), answer("everything"), 1e-5)


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


@pytest.mark.thorough
def test_offload_moves_the_layers_input_to_the_host_and_back():
    def placements(policy: str) -> list[str]:
        # On a CPU all memory is the host's, and nothing is moved.
        lowered = trace(policy, 2).lower(lowering_platforms=("tpu",))
        return re.findall(r'_xla_buffer_placement = "(\w+)"', lowered.as_text())

    assert placements("offload") == ["pinned_host", "device"]
    assert placements("attention") == []
