"""The split of a text depends on the text, and both splits get one where they can."""

import pytest

from data.text.holdout import Holdout


def splits(texts, fraction=0.25):
    holdout = Holdout(fraction)
    for text in texts:
        holdout.add(text)
    return [holdout.split(text) for text in texts]


def test_about_the_share_is_held_out_whatever_the_order_and_the_copies():
    texts = [f"text {i}" for i in range(400)]
    forward = splits(texts)
    assert 70 <= forward.count("validation") <= 130
    assert splits(texts[::-1]) == forward[::-1]
    assert splits(texts + texts) == forward + forward


def test_the_share_is_that_of_the_characters(rng):
    """Few texts are most of many corpora."""
    sizes = (rng.lognormal(6, 1.5, 225)).astype(int) + 1
    texts = [f"{i:3} ".ljust(size, "x") for i, size in enumerate(sizes)]
    held = [
        len(t) for t, s in zip(texts, splits(texts, 0.1), strict=True) if s != "train"
    ]
    assert abs(sum(held) - 0.1 * sum(map(len, texts))) <= sizes.max() / 2 + 4


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_both_splits_get_a_text_where_two_differ(fraction):
    assert set(splits(["one", "other"], fraction)) == {"train", "validation"}
    assert splits(["same", "same"], fraction) == ["train", "train"]


def test_few_texts_are_held_out_for_a_batch_where_no_share_is_asked_for():
    texts = [f"{i} " * (i % 50 + 1) for i in range(300)]
    sizes = {}
    for least in 0, 1000, 10**9:
        holdout = Holdout(None, least)
        for text in texts:
            holdout.add(text)
        held = [text for text in texts if holdout.split(text) == "validation"]
        sizes[least] = sum(map(len, held))
    total = sum(map(len, texts))
    assert sizes[0] < 0.04 * total
    assert 1000 <= sizes[1000] < 1200 < 0.07 * total <= sizes[10**9] < 0.1 * total + 200
    # Whatever their order, and beside a share that is asked for.
    shuffled = Holdout(None, 1000)
    for text in sorted(texts):
        shuffled.add(text)
    assert sum(len(t) for t in texts if shuffled.split(t) != "train") == sizes[1000]


@pytest.mark.parametrize("fraction", [0, 1, -0.5, float("nan")])
def test_shares_are_between_nothing_and_all(fraction):
    with pytest.raises(ValueError, match=f"validation_fraction={fraction} must be"):
        Holdout(fraction)
