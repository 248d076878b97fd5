"""Cached, sharded generation against the whole forward, and which tokens are drawn."""

import functools
from collections.abc import Callable
from dataclasses import replace
from os.path import commonprefix
from typing import Any

import jax
import numpy as np
import pytest

from data.document_mask import DocumentMask
from models.cache import EMPTY
from models.decode import NOTHING, Generator, Held
from models.sampling import Sampling, row_keys, sample
from tasks.generation import generator
from tasks.text import TextRun
from tests.cases import in_tiers, table
from tests.small.models import (
    ROWS,
    SLOTS,
    VOCAB,
    config_of,
    parameters_on,
    partition_of,
    whole_forward,
)
from training.sharding.mesh import MeshShape

NEW = SLOTS - 11 + 1
"""Tokens generated: to the cache's last slot, as the last is not put there."""

PROMPT = np.arange(3)
GREEDY = Sampling(temperature=0.0)


def some_prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, VOCAB, length) for length in (11, 5)]


def forward_of(family: str, mask: str) -> Callable[[np.ndarray], np.ndarray]:
    lengths = np.full((ROWS, 1), SLOTS, np.int32)
    return whole_forward(family, DocumentMask.parse(mask).of_prompts(lengths))


@functools.cache
def uncached(family: str = "llama", mask: str = "causal") -> np.ndarray:
    """Greedy tokens of `some_prompts`, (NEW, ROWS): the whole row again every time."""
    forward = forward_of(family, mask)
    lengths = np.array([len(prompt) for prompt in some_prompts()])
    tokens = np.zeros((ROWS, SLOTS + 1), np.int32)
    for row, prompt in enumerate(some_prompts()):
        tokens[row, : len(prompt)] = prompt
    rows = np.arange(ROWS)
    for _ in range(NEW):
        logits = forward(tokens[:, :-1])
        tokens[rows, lengths] = logits[rows, lengths - 1].argmax(axis=-1)
        lengths += 1
    return np.stack([tokens[rows, lengths - NEW + i] for i in range(NEW)])


@functools.cache
def generator_on(
    shape: MeshShape,
    attention: str,
    sampling: Sampling = GREEDY,
    model: tuple[str, str] = ("llama", "causal"),
    **sizes: int,
) -> tuple[Generator, Any]:
    """A generator and its parameters; model: family and the run's mask."""
    family, mask = model
    config, partition = config_of(attention, family, mask=mask), partition_of(shape)
    run = TextRun(config, partition)
    sizes = {"rows": ROWS, "cache_tokens": SLOTS} | sizes
    programs = generator(run, sampling, **sizes)
    return programs, parameters_on(partition, family)


def generated(
    programs: tuple[Generator, Any], max_tokens: int = NEW, **options: Any
) -> np.ndarray:
    """(tokens, ROWS)."""
    one, parameters = programs
    options = {"seed": 0} | options
    steps = one.generate(parameters, some_prompts(), max_tokens, **options)
    return np.stack(list(steps))


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "model, attention, mesh", in_tiers("models.txt", "decode"), ids=str
)
def test_cached_tokens_are_those_of_the_whole_forward_each_time(model, attention, mesh):
    want = uncached(*model)
    assert (want != uncached(model[0])).any() or model[1] == "causal"
    got = generated(generator_on(MeshShape(**mesh), attention, model=model))
    np.testing.assert_array_equal(got, want)
    assert len(np.unique(got)) > 5


def test_all_steps_and_prompts_of_like_lengths_share_a_program():
    one, parameters = generator_on(MeshShape(ring=4), "striped")
    compiled = {name: getattr(one, name)._cache_size() for name in ("step", "prefill")}
    generated((one, parameters), 3)
    prompts = [prompt[:-1] for prompt in some_prompts()]
    assert len(list(one.generate(parameters, prompts, 4, seed=0))) == 4
    for name, before in compiled.items():
        assert getattr(one, name)._cache_size() == max(before, 1)


def test_a_row_that_has_ended_gets_nothing_and_others_go_on():
    want = uncached()
    stop = int(want[6, 0])
    ends = [int(np.argmax(np.append(want[:, row], stop) == stop)) for row in (0, 1)]
    got = generated(generator_on(MeshShape(ring=4), "striped"), stop_tokens=[stop])
    assert len(got) == min(max(ends) + 1, NEW) and ends[0] != ends[1]
    for row, end in enumerate(ends):
        np.testing.assert_array_equal(got[: end + 1, row], want[: end + 1, row])
        assert (got[end + 1 :, row] == NOTHING).all()


@pytest.mark.parametrize("others, tokens, words", table("models.txt", "generate"))
def test_what_cannot_be_generated_is_refused(others, tokens, words):
    one, parameters = generator_on(MeshShape(ring=4), "striped")
    others = [np.array(prompt, None if prompt else int) for prompt in others]
    with pytest.raises(ValueError, match=words):
        one.generate(parameters, [PROMPT, *others], tokens, seed=0)


class Counter:
    """Counts the tokens that go through a generator's programs, row by row."""

    def __init__(self, one: Generator):
        self.reads = {"prefill": [], "step": []}

        def counting(name: str, parameters: Any, cache: Any, tokens: Any, *rest: Any):
            self.reads[name].append((np.asarray(rest[0]) != EMPTY).sum(axis=1).tolist())
            return getattr(one, name)(parameters, cache, tokens, *rest)

        counted = {name: functools.partial(counting, name) for name in self.reads}
        self.generator = replace(one, **counted)

    def total(self, name: str) -> list[int]:
        """Tokens of each row since the last time."""
        found = np.sum(self.reads[name] or [[0] * ROWS], axis=0).tolist()
        self.reads[name].clear()
        return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model, attention, mesh", in_tiers("models.txt", "onward"), ids=str
)
def test_a_prompt_that_begins_as_what_is_held_goes_on_from_it(
    model, attention, mesh, rng
):
    """Its text is that of the whole prompt, and the rest alone is computed."""
    one, parameters = generator_on(MeshShape(**mesh), attention, model=model)
    counter, held = Counter(one), Held()
    prompts = some_prompts()

    def follow(prompts: list[np.ndarray], count: int, held: Held | None) -> np.ndarray:
        programs = one if held is None else counter.generator
        steps = programs.generate(parameters, prompts, count, seed=0, held=held)
        return np.stack(list(steps))

    follow(prompts, 4, held)
    assert counter.total("prefill") == [11, 5] and counter.total("step") == [3, 3]
    for turn in range(8):
        before, after = [np.array(row) for row in held.tokens], []
        for row in before:  # from some place on, other tokens
            keep = len(row) if turn < 3 else rng.integers(len(row) // 2, len(row) + 1)
            new = rng.integers(0, VOCAB, rng.integers(1, 4))
            after.append(np.concatenate([row[:keep], new])[:30])
        got = follow(after, 3, held)
        np.testing.assert_array_equal(got, follow(after, 3, None))
        lengths = [len(prompt) for prompt in after]
        pairs = [(p.tolist(), r.tolist()) for p, r in zip(after, before, strict=True)]
        new = [len(p) - len(commonprefix([p[:-1], row])) for p, row in pairs]
        if counter.reads["prefill"]:  # rows that differ had taken too many slots
            assert turn >= 3 and counter.total("prefill") == lengths
            new = [0, 0]
        assert counter.total("step") == [count + 2 for count in new]
        for prompt, row, drawn in zip(after, held.tokens, got.T, strict=True):
            assert row == [*prompt, *drawn[:2]]


@pytest.mark.thorough
def test_what_is_held_is_not_gone_on_from_where_it_would_not_pay_or_be_right():
    one, parameters = generator_on(MeshShape(ring=4), "striped")
    counter, held = Counter(one), Held()
    prompts = some_prompts()

    def reads(prompts: list[np.ndarray], count: int = 1) -> list[int]:
        list(counter.generator.generate(parameters, prompts, count, 0, held=held))
        counter.total("step")
        return counter.total("prefill")

    assert reads(prompts) == [11, 5]
    # What begins otherwise; what is held, but for the last token; much that is new.
    others = [(prompts[0] + 1) % VOCAB] * 2
    assert reads(others) == [11, 11]
    assert reads(others) == [0, 0]
    long = [np.concatenate([prompt, np.arange(19)]) for prompt in others]
    assert reads(long) == [30, 30]
    # The last slots of a member are filled one by one.
    full = [np.concatenate([prompt, np.arange(SLOTS)])[:SLOTS] for prompt in long]
    for length in (45, 60, SLOTS):
        assert reads([prompt[:length] for prompt in full]) == [0, 0]
        assert np.asarray(held.cache.filled).sum() == length
    assert [*map(len, held.tokens)] == [SLOTS] * 2
    assert np.asarray(held.cache.filled).tolist() == [SLOTS // 4] * 4
    prefix = generator_on(MeshShape(ring=4), "striped", model=("llama", "prefix(5)"))
    assert (one.block, prefix[0].block) == (2, 0)


BRANCH = 9
"""Tokens of each sample, of which the last is not put into the cache."""


@pytest.mark.thorough
@pytest.mark.parametrize(
    "model, attention, mesh, temperature, samples, slots",
    in_tiers("models.txt", "samples"),
    ids=str,
)
def test_samples_are_separate_runs_from_one_cache_of_the_prompt(
    model, attention, mesh, temperature, samples, slots
):
    """Each token is what the whole forward and the sample's own key give."""
    sampling, prompts = Sampling(temperature), some_prompts()
    tokens = 11 + samples * (BRANCH - 1)
    sizes = {"cache_tokens": tokens, "samples": samples}
    shape = MeshShape(**mesh)
    one, parameters = generator_on(shape, attention, sampling, model, **sizes)
    counter, held = Counter(one), Held()

    def drawn(prompts: list, count: int = BRANCH, **options: Any) -> np.ndarray:
        given = parameters, prompts, count, 3
        return np.stack([*counter.generator.generate(*given, **options)])

    got = drawn(prompts, held=held)
    assert counter.total("prefill") == [11, 5]
    assert counter.total("step") == [tokens - 11] * ROWS
    sizes = TextRun(config_of(attention, model[0]), partition_of(shape)).sizes
    token = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * 4  # bytes
    cache = held.cache
    assert cache.keys.nbytes + cache.values.nbytes == ROWS * slots * token
    assert np.asarray(cache.filled).sum() == tokens
    forward, keys = forward_of(*model), row_keys(3, samples * ROWS)
    rows, lengths = np.arange(ROWS), np.array([11, 5], np.int32)
    for number in range(samples):
        own = slice(number * ROWS, (number + 1) * ROWS)
        texts = np.zeros((ROWS, SLOTS), np.int32)
        for row, prompt in enumerate(prompts):
            text = [*prompt, *got[:, own][:, row]]
            texts[row, : len(text)] = text
        logits = forward(texts)
        for step in range(BRANCH):
            scores = logits[rows, lengths - 1 + step]
            want = program(sampling)(scores, keys[own], lengths + step)
            np.testing.assert_array_equal(got[step, own], want)
    # A sample that has ended waits for the others, and the first may go on.
    stop = got[BRANCH // 2, -1]
    ended = np.cumsum(got == stop, axis=0) - (got == stop) > 0
    again = drawn(prompts, stop_tokens=[stop])
    np.testing.assert_array_equal(again, np.where(ended, NOTHING, got)[: len(again)])
    counter.total("prefill")
    assert [row[-8:] for row in held.tokens] == got[:-1, :ROWS].T.tolist()
    onward = [np.array([*row[:-4], 1, 2]) for row in held.tokens]
    further = drawn(onward, 2, held=held)
    assert counter.total("prefill") == ([0, 0] if one.block else [17, 11])
    np.testing.assert_array_equal(further, drawn(onward, 2))


def test_sizes_that_do_not_divide_over_the_mesh_are_refused():
    config = config_of("striped")
    partition = partition_of(MeshShape(fsdp=2, ring=4))
    with pytest.raises(ValueError, match="3 batch do not divide"):
        generator(TextRun(config, partition), GREEDY, rows=3, cache_tokens=SLOTS)
    for tokens, samples in ((0, 1), (9, 0)):
        sizes = {"rows": 2, "cache_tokens": tokens, "samples": samples}
        with pytest.raises(ValueError, match=f"={tokens} and samples={samples} must"):
            generator(TextRun(config, partition), GREEDY, **sizes)


DRAWS = 4000
P = np.array([0.15, 0.4, 0.05, 0.3, 0.1])
"""Probabilities; by rank: tokens 1, 3, 0, 4, 2."""


@functools.cache
def program(sampling: Sampling):
    return jax.jit(functools.partial(sample, sampling=sampling))


@pytest.mark.parametrize("fields, kept, power", table("models.txt", "draw"))
def test_tokens_are_drawn_with_their_probability(fields, kept, power):
    logits = np.tile(np.log(P).astype(np.float32), (DRAWS, 1))
    arguments = logits, row_keys(0, DRAWS), np.zeros(DRAWS, np.int32)
    drawn = program(Sampling(**fields))(*arguments)
    got = np.bincount(drawn, minlength=len(P)) / DRAWS
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
