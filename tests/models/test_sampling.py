"""Sampled tokens: which may be drawn, and how often."""

import functools

import jax
import numpy as np
import pytest

from models.sampling import Sampling, row_keys, sample
from tests.cases import table

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


@pytest.mark.parametrize("fields, kept, power", table("models.txt", "draw"))
def test_tokens_are_drawn_with_their_probability(fields, kept, power):
    got = frequencies(Sampling(**fields))
    expected = np.where(np.isin(np.arange(len(P)), kept), P, 0) ** power
    expected /= expected.sum()
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


@pytest.mark.parametrize("fields, message", table("models.txt", "sampling"))
def test_settings_without_a_meaning_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)
