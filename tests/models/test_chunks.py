"""Chunked maps against the whole map, with gradients and memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.memory import Device, choose_chunk, scan_chunks

TOKENS = 13
each_chunk = pytest.mark.parametrize("chunk", [1, 4, 13, 100])


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def assert_close(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@each_chunk
def test_chunks_give_what_the_whole_gives_with_its_gradients(chunk, rng):
    x, w, ahead = normal(rng, TOKENS, 5), normal(rng, 5, 7), normal(rng, TOKENS, 7)

    def mapped(x, w):
        return jnp.tanh(x @ w)

    def whole(x, w):
        return (ahead * mapped(x, w)).sum(), mapped(x, w)

    def chunked(x, w):
        y = scan_chunks(lambda part: mapped(part, w), x, chunk)
        return (ahead * y).sum(), y

    got, want = (
        jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(x, w)
        for f in (chunked, whole)
    )
    assert_close(got, want)


@each_chunk
def test_several_arrays_are_cut_alike_and_keep_their_own_shapes(chunk, rng):
    x, numbers = normal(rng, TOKENS, 2, 3), jnp.arange(TOKENS, dtype=jnp.int32)

    def labelled(parts):
        x, numbers = parts
        return x.sum(axis=1) + numbers[:, None].astype(x.dtype)

    got = scan_chunks(labelled, (x, numbers), chunk)
    assert got.shape == (TOKENS, 3)
    assert_close(got, labelled((x, numbers)))


def test_function_sees_no_more_tokens_than_a_chunk(rng):
    lengths = []

    def note(part):
        lengths.append(part.shape[0])
        return part

    for chunk in (1, 4, 100):
        assert scan_chunks(note, normal(rng, TOKENS), chunk).shape == (TOKENS,)
    assert set(lengths) == {1, 4, TOKENS}


def test_gradient_holds_one_chunk_of_the_wide_values(rng):
    tokens, narrow, wide = 2048, 8, 1024

    def loss(x, w, chunk):
        y = scan_chunks(lambda part: jnp.tanh(part @ w) @ w.T, x, chunk)
        return jnp.square(y).sum()

    def temporary_bytes(chunk):
        gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
        lowered = gradient.lower(
            normal(rng, tokens, narrow), normal(rng, narrow, wide), chunk
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
