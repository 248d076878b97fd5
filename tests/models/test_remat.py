"""What each policy keeps of a layer, and that none of them changes a gradient."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.memory import REMAT_POLICIES
from tests.models.test_language_model import LENGTH, ROWS, Run, rows
from training.mesh import MeshShape

ONE_DEVICE = MeshShape()
each_policy = pytest.mark.parametrize("policy", REMAT_POLICIES)


def run_with(policy: str, shape: MeshShape = ONE_DEVICE, **overrides) -> Run:
    """One chunk of the feed-forward holds all tokens: smaller ones are recomputed."""
    chunks = {"feed_forward_chunk_tokens": ROWS * LENGTH, "loss_chunk_tokens": 16}
    return Run(shape, "striped", remat=policy, **chunks | overrides)


def trace(policy: str, ring_size: int = 1, **overrides):
    """Of loss and gradients, as the train step takes them."""
    run = run_with(policy, MeshShape(ring=ring_size), **overrides)
    batch = jax.tree.map(jnp.asarray, rows())
    arguments = run.model.shapes, batch, run.model.frozen_shapes
    return jax.jit(jax.value_and_grad(run.loss)).trace(*arguments)


@functools.cache
def answer(policy: str):
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
    got, want = map(jax.tree.leaves, (answer(policy), answer("everything")))
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b)


@pytest.mark.thorough(quick=2)
@each_policy
def test_ring_runs_again_only_where_its_result_is_not_kept(policy):
    """Of "tail", the ring of half of the keys, which is beside the whole one before."""
    ring_size, runs = 4, {"nothing": 2, "offload": 2, "tail": 3}.get(policy, 1)
    program = trace(policy, ring_size).lower().as_text()
    rotations = len(re.findall(r"stablehlo\.collective_permute", program))
    # The layers are a loop, so each is there once: keys and values, then those and
    # their gradients, which have to come home.
    forward, backward = 2 * (ring_size - 1), 2 * (ring_size - 1) + 2 * ring_size
    assert rotations == runs * forward + backward


def products(policy: str, **overrides) -> int:
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
    shape = MeshShape(fsdp=2, ring=2, tensor=2)
    parts = (
        run_with("attention", where, model__norms="both", feed_forward_chunk_tokens=n)
        for where, n in ((shape, 7), (ONE_DEVICE, 0))
    )
    got, want = (jax.tree.leaves(run.answer()) for run in parts)
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_offload_moves_the_layers_input_to_the_host_and_back():
    def placements(policy: str) -> list[str]:
        # On a CPU all memory is the host's, and nothing is moved.
        lowered = trace(policy, 2).lower(lowering_platforms=("tpu",))
        return re.findall(r'_xla_buffer_placement = "(\w+)"', lowered.as_text())

    assert placements("offload") == ["pinned_host", "device"]
    assert placements("attention") == []
