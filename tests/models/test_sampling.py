"""Sampled tokens: which may be drawn, and how often."""

import functools

import jax
import numpy as np
import pytest

from models.sampling import Sampling, row_keys, sample

DRAWS = 4000
P = np.array([0.15, 0.4, 0.05, 0.3, 0.1])
"""Probabilities; by rank: tokens 1, 3, 0, 4, 2."""


@functools.cache
def program(sampling: Sampling):
    return jax.jit(functools.partial(sample, sampling=sampling))


def frequencies(sampling: Sampling) -> np.ndarray:
    """Of as many draws, each in a row of its own, at index 0."""
    logits = np.tile(np.log(P).astype(np.float32), (DRAWS, 1))
    drawn = program(sampling)(logits, row_keys(0, DRAWS), np.zeros(DRAWS, np.int32))
    return np.bincount(drawn, minlength=len(P)) / DRAWS


def renormalised(kept: list[int], power: float = 1.0) -> np.ndarray:
    p = np.where(np.isin(np.arange(len(P)), kept), P, 0) ** power
    return p / p.sum()


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(), P),
        (Sampling(temperature=0.5), renormalised([0, 1, 2, 3, 4], 2)),
        (Sampling(top_k=2), renormalised([1, 3])),
        (Sampling(top_k=50), P),
        (Sampling(top_p=0.71), renormalised([1, 3, 0])),
        (Sampling(top_p=0.69), renormalised([1, 3])),
        (Sampling(top_k=3, top_p=0.5), renormalised([1, 3])),
        (Sampling(temperature=2.0, top_k=3), renormalised([1, 3, 0], 0.5)),
        (Sampling(allowed_tokens=3), renormalised([0, 1, 2])),
        # One token is left.
        (Sampling(temperature=0.0), renormalised([1])),
        (Sampling(top_k=1), renormalised([1])),
        (Sampling(top_p=1e-6), renormalised([1])),
        (Sampling(temperature=1e-3), renormalised([1])),
        (Sampling(temperature=1e-40), renormalised([1])),
        (Sampling(temperature=0.0, allowed_tokens=1), renormalised([0])),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probability(sampling, expected):
    got = frequencies(sampling)
    np.testing.assert_allclose(got, expected, atol=5 * np.sqrt(0.25 / DRAWS))
    assert (got[expected == 0] == 0).all()


def test_a_draw_depends_on_seed_row_and_index_alone():
    logits = np.random.default_rng(0).standard_normal((64, 50)).astype(np.float32)
    one = program(Sampling())
    index = np.arange(64, dtype=np.int32)
    first = np.asarray(one(logits, row_keys(3, 64), index))
    half = np.asarray(one(logits[:32], row_keys(3, 32), index[:32]))
    np.testing.assert_array_equal(half, first[:32])
    assert (np.asarray(one(logits, row_keys(4, 64), index)) != first).any()
    assert (np.asarray(one(logits, row_keys(3, 64), index + 1)) != first).any()
    same_logits = np.tile(logits[:1], (64, 1))
    rows = np.asarray(one(same_logits, row_keys(3, 64), np.zeros(64, np.int32)))
    assert len(np.unique(rows)) > 10


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be above 0, or 0"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"temperature": float("inf")}, "temperature=inf must be"),
        ({"top_k": -1}, "top_k=-1 .* numbers of tokens"),
        ({"allowed_tokens": -1}, "allowed_tokens=-1 must be numbers of tokens"),
        ({"top_p": 0.0}, "top_p=0.0 must be a probability above 0"),
        ({"top_p": 1.5}, "top_p=1.5 must be a probability"),
    ],
)
def test_settings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)
