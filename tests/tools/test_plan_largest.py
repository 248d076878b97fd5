"""The search for the largest size, on memory that a function makes up."""

import math
import random

import pytest

from tools.lib.planning.largest import TOLERANCE, Search, Try

LIMIT = 1000.0


def search(peak_of, first=1024, unit=256, **more):
    """The contexts that are tried, and the longest that fits."""
    sizes = Search(unit, LIMIT, **more)
    tries = sizes.largest(peak_of, first)
    best = sizes.best(tries)
    return [one.size for one in tries], best and best.size


def assert_is_longest(best, peak_of, unit=256):
    """Against trying everything up to the first that does not fit."""
    longest = 0
    while (peak := peak_of(longest + unit)) is not None and peak <= LIMIT:
        longest += unit
    assert best <= longest <= best + max(unit, TOLERANCE * longest)


@pytest.mark.parametrize("first", [256, 1024, 40_000, 10_000_000])
@pytest.mark.parametrize("fixed", [0, 400, 900])
def test_linear_memory_takes_few_tries_from_anywhere(fixed, first):
    def peak_of(context):
        return fixed + math.ceil(context / 40)

    tries, best = search(peak_of, first)
    assert_is_longest(best, peak_of)
    assert len(tries) <= 6


def test_what_the_compiler_refuses_counts_as_too_large():
    def peak_of(context):
        return None if context > 20_000 else context // 40

    tries, best = search(peak_of, first=100_000)
    assert tries[0] == 100_000 // 256 * 256
    assert_is_longest(best, peak_of)
    assert len(tries) <= 10


def test_memory_with_jumps_is_still_searched_to_the_end():
    numbers = random.Random(5)
    for _ in range(50):
        fixed, step = numbers.randrange(600), numbers.randrange(256, 5000)

        def peak_of(context, fixed=fixed, step=step):
            return fixed + -(-context // step) * step // 50

        tries, best = search(peak_of, first=numbers.randrange(256, 60_000))
        assert_is_longest(best, peak_of)
        assert len(tries) <= 12


def test_where_nothing_fits_there_is_no_answer():
    tries, best = search(lambda context: None, first=4096)
    assert best is None and tries[-1] == 256
    assert search(lambda context: 2000 + context)[1] is None


@pytest.mark.parametrize(("first", "unit"), [(0, 1), (1, 0), (-5, 4)])
def test_contexts_of_nothing_are_refused(first, unit):
    with pytest.raises(ValueError, match=f"first={first} and unit={unit} must be"):
        search(lambda context: 10, first, unit)


@pytest.mark.parametrize("layers", [0, 1, 7, 31, 32])
@pytest.mark.parametrize("first", [1, 8, 32])
def test_layers_are_counted_to_the_last_one_from_what_is_known_of_none(layers, first):
    """The first layer that keeps more takes more memory than another."""

    def peak_of(count):
        return 500 + min(1, count) * 40 + 10 * count

    limit = peak_of(layers) + 5
    sizes = Search(1, limit, most=32)
    tries = sizes.largest(peak_of, first, [Try(0, peak_of(0))])
    best = sizes.best(tries)
    assert best is not None and best.size == layers and len(tries) <= 6
    assert all(one.size <= 32 for one in tries)
