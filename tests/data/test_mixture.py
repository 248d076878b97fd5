"""Several corpora in one run: shares, epochs, and what does not go together."""

import re
from collections import Counter

import numpy as np
import pytest

from data.batch import Block
from data.mixture import MixedOrder, MixedRows, check_alike, parse_mixture, shares
from data.rows import InOrder, PackedRows, Shuffled, TextBatches
from data.text.corpus import prepare
from data.text.tokens.published import open_tokenizer
from data.text.tokens.token_file import TokenFile
from kernels.layouts import Striped
from tests.cases import table
from tests.data.test_tokenizer import make_hugging_face
from tests.small.corpora import assert_same_batch, make_corpus

SIZES = 2570, 650, 330
ROWS = 160, 40, 20
LENGTH = 16


@pytest.fixture
def plans(tmp_path):
    """Of one document each."""
    found = []
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}").mkdir()
        found.append(PackedRows(make_corpus(tmp_path / f"{number}", [size]), LENGTH))
    assert tuple(plan.rows for plan in found) == ROWS
    return found


def rows_of(sequence, count):
    """The first rows of a sequence, as (plan, row)."""
    ends = np.cumsum(ROWS)
    rows = np.array([sequence[place] for place in range(count)])
    numbers = np.searchsorted(ends, rows, side="right")
    return [(n, r - int(ends[n]) + ROWS[n]) for n, r in zip(numbers, rows, strict=True)]


@pytest.mark.parametrize("text, expected", table("data.txt", "mixture"))
def test_mixtures_are_directories_and_weights(text, expected):
    assert parse_mixture(text) == expected


@pytest.mark.parametrize("text, match", table("data.txt", "no-mixture"))
def test_what_is_no_mixture_is_refused(text, match):
    with pytest.raises(ValueError, match=f"{re.escape(repr(text))}.*{match}.*a:0.7"):
        parse_mixture(text)


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.2), (1, 1, 8)])
def test_shares_hold_and_small_corpora_are_read_again(weights):
    sequence = MixedOrder(ROWS, weights, Shuffled(3)).sequence(sum(ROWS))
    found = rows_of(sequence, 1000)
    for end in 100, 1000:
        counts = Counter(number for number, _ in found[:end])
        for number, weight in enumerate(weights):
            assert abs(counts[number] - end * weight / sum(weights)) <= 2
    for number, count in enumerate(ROWS):
        own = [row for n, row in found if n == number]
        epochs = [own[i : i + count] for i in range(0, len(own) - count + 1, count)]
        assert all(sorted(epoch) == [*range(count)] for epoch in epochs)
        if len(epochs) > 2:
            assert epochs[0] != epochs[1]


def test_without_weights_every_row_is_read_once_in_an_epoch():
    mixed = MixedOrder(ROWS, shares(dict.fromkeys("abc"), ROWS), Shuffled(3))
    sequence = mixed.sequence(sum(ROWS))
    for epoch in range(2):
        rows = [sequence[epoch * sum(ROWS) + place] for place in range(sum(ROWS))]
        assert sorted(rows) == [*range(sum(ROWS))]


def test_held_out_rows_are_mixed_in_order_and_none_is_read_twice():
    sequence = MixedOrder(ROWS, (0.5, 0.25, 0.25), InOrder()).sequence(sum(ROWS))
    assert len(sequence) == 4 * ROWS[2]
    found = rows_of(sequence, len(sequence))
    assert sorted(found) == sorted({*found})
    assert [row for number, row in found if number == 0] == [*range(40)]


def test_rows_of_a_mixture_are_those_of_its_parts(plans):
    mixed, index = MixedRows(plans), np.arange(LENGTH, dtype=np.int32)
    own = [plan.read(row, index) for plan in plans for row in range(plan.rows)]
    assert mixed.length == LENGTH and mixed.rows == sum(ROWS) == len(own)
    for row, expected in enumerate(own):
        assert_same_batch(mixed.read(row, index), expected)
        assert mixed.work(row) == (expected.k_end - expected.k_start).sum()


def test_corpora_of_unlike_tokenizers_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    specials = "<|endoftext|> <s>", "<|endoftext|> <s> more", "</s> <s>"
    corpora = []
    for number, names in enumerate(("", *specials, specials[0])):
        path, output = tmp_path / f"{number}.json", tmp_path / f"{number}"
        spec = str(make_hugging_face(path, names.split())) if names else "bytes"
        prepare([tmp_path / "a.txt"], output, open_tokenizer(spec))
        corpora.append(TokenFile.open(output, "train"))
    begins = '{"add_bos_token": true, "bos_token": "<s>"}'
    (tmp_path / "tokenizer_config.json").write_text(begins)
    prepare([tmp_path / "a.txt"], tmp_path / "5", open_tokenizer(f"{tmp_path}/1.json"))
    corpora.append(TokenFile.open(tmp_path / "5", "train"))
    check_alike([corpora[1], corpora[4]])
    check_alike([corpora[0], corpora[0]])
    unlike = (0, 1, "vocabulary"), (1, 2, "vocab"), (1, 3, "tokenizer"), (1, 5, "begin")
    for one, other, what in unlike:
        found = corpora[one], corpora[other]
        with pytest.raises(ValueError, match=f"differ in their {what}.*the same tok"):
            check_alike(found)


def test_the_rows_left_over_of_a_mixture_are_the_first_of_a_batch(plans):
    """Of those that the mixture reads, which may leave some out."""
    mixed = MixedRows(plans), MixedOrder(ROWS, (0.8, 0.1, 0.1), InOrder())
    block, rest = Block((0, 16), (0, LENGTH)), (16, Striped(), 1, mixed[1])
    whole = TextBatches(mixed[0], [block], *rest)
    filled = TextBatches(mixed[0], [block], *rest, fills=True)
    over = filled.ordered - 16 * len(whole)
    assert filled.ordered < filled.rows == sum(ROWS)
    assert 0 < over < 16 and len(filled) == len(whole) + 1
    for step in range(len(whole)):
        assert_same_batch(filled[step][block], whole[step][block])
    one = TextBatches(mixed[0], [Block((0, 1), (0, LENGTH))], 1, *rest[1:])
    for row in range(over):
        (alone,) = one[16 * len(whole) + row].values()
        last = filled[len(whole)][block].tokens[row]
        np.testing.assert_array_equal(last, alone.tokens[0])
