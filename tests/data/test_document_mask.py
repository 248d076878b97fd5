"""Masks of a run: read from a config, and the rows that they make."""

import numpy as np
import pytest

from data.document_mask import DocumentMask
from data.rows import ROW_PLANS
from kernels import masks
from tests.cases import table
from tests.small.corpora import make_corpus, read_rows

LENGTH = 20
MASKS = ["causal", "window(1)", "window(5)", "window(2147483647)", "prefix(1)"]
MASKS += ["prefix(4)", "prefix(2147483647)"]


def shown(mask: str, query: int, key: int) -> bool:
    """Whether a token sees another, by their positions in one document."""
    size = int("".join(filter(str.isdigit, mask)) or 0)
    if mask.startswith("prefix"):
        return key <= query or key < size
    return key <= query and (not size or query - key < size)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rows", ROW_PLANS)
def test_tokens_see_what_the_mask_shows_and_lose_targets_that_they_see(
    tmp_path, rows, mask
):
    corpus = make_corpus(tmp_path, [7, 1, 12, 3, 20, 2, 9, 1, 1, 5, 16])
    parsed = DocumentMask.parse(mask)
    plan = ROW_PLANS[rows](corpus, LENGTH, parsed)
    causal = read_rows(ROW_PLANS[rows](corpus, LENGTH))
    for number, (row, plain) in enumerate(zip(read_rows(plan), causal, strict=True)):
        is_real = plain.k_end > plain.k_start
        documents = np.cumsum(plain.positions == 0)
        places = list(zip(documents, plain.positions, strict=True))
        wanted = [
            [document == other and shown(mask, query, key) for other, key in places]
            for document, query in places
        ]
        wanted &= is_real & is_real[:, None]
        index = np.arange(LENGTH)
        seen = masks.in_interval(row.k_start[:, None], index, row.k_end[:, None])
        np.testing.assert_array_equal(seen, wanted)
        assert plan.work(number) == wanted.sum()
        sees_target = np.array([shown(mask, at, at + 1) for _, at in places])
        weights = plain.loss_weights * ~sees_target
        np.testing.assert_array_equal(row.loss_weights, weights)
        for name in ("tokens", "targets", "positions"):
            same = getattr(row, name), getattr(plain, name)
            np.testing.assert_array_equal(*same, err_msg=name, strict=True)
        for bound in (row.k_start, row.k_end):
            assert (np.diff(bound) >= 0).all() and bound.dtype == np.int32
            assert bound.max() <= LENGTH  # a target behind the row is no key


@pytest.mark.parametrize("mask", MASKS)
def test_a_prompt_sees_what_it_would_in_training(tmp_path, mask):
    parsed, index = DocumentMask.parse(mask), np.arange(LENGTH, dtype=np.int32)
    (row,) = read_rows(
        ROW_PLANS["documents"](make_corpus(tmp_path, [13]), LENGTH, parsed)
    )
    lengths = np.array([[13], [3]], np.int32)
    prompts = parsed.of_prompts(lengths) & masks.padding(lengths)
    got = prompts(index, LENGTH)
    for bound, want in zip(got, row[-2:], strict=True):
        np.testing.assert_array_equal(bound[0, :13], want[:13])
    shown_to_all = 3 if mask.startswith("prefix(") and mask != "prefix(1)" else 1
    assert got.k_end[1, :3].tolist() == [max(i + 1, shown_to_all) for i in range(3)]


@pytest.mark.parametrize("text", [text for (text,) in table("data.txt", "no-mask")])
def test_what_is_no_mask_is_refused_with_an_example(text):
    with pytest.raises(ValueError) as caught:
        DocumentMask.parse(text)
    message = str(caught.value)
    assert f"mask={text!r}" in message and 'as in "window(4096)"' in message
