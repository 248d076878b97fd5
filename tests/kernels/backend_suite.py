"""The tests that every backend of an attention step passes.

A subclass in `test_backends` names a backend and its traits, in about 40 lines.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from kernels.backends import Backend
from kernels.backends.tile_layout import BlockSizes
from tests.cases import table
from tests.cases.attention import FLOAT32_TOLERANCE, Answer
from tests.support.steps import (
    PASSES,
    Step,
    StepCase,
    answer,
    assert_true,
    shared,
    truth,
)

Interval = tuple[int, int]


@dataclass(frozen=True)
class Groups:
    """A step whose query rows come in groups that share an interval.

    rows: query rows of a group.
    query_tile, granule: rows and keys that are skipped as a whole or not at all.
    gaps: intervals that leave granules masked between visible ones, and the last
      query tile without a key.
    aligned: intervals whose ends are multiples of the granule.
    slot: a key that is visible to some of the aligned groups.
    """

    case: StepCase
    rows: int
    query_tile: int
    granule: int
    gaps: tuple[Interval, ...]
    aligned: tuple[Interval, ...]
    slot: int

    def step(
        self, rng: np.random.Generator, dtype: jnp.dtype, bounds: tuple[Interval, ...]
    ) -> Step:
        k_start, k_end = np.repeat(np.array(bounds, np.int32), self.rows, axis=0).T
        return self.case.draw(rng, dtype)._replace(
            k_start=k_start[None], k_end=k_end[None]
        )

    def visible(self, step: Step) -> np.ndarray:
        """Which query sees which key, (T, S)."""
        slot = np.arange(self.case.keys)
        return (step.k_start[0][:, None] <= slot) & (slot < step.k_end[0][:, None])


class Refusal(NamedTuple):
    """What a backend has no kernel for, and how it says so.

    backend: the one that refuses, if it is not that of the suite.
    passes: which of the two steps refuse it.
    """

    error: type[Exception]
    words: str
    dtype: jnp.dtype = jnp.bfloat16
    queries: int = 32
    heads: int = 2
    head_dim: int = 64
    soft_cap: float | None = None
    backend: Backend | None = None
    passes: tuple[str, ...] = ("forward", "backward")

    def check(self, backend: Backend) -> None:
        """Traces the passes, which compute nothing, and expects the refusal of each."""
        cap = {} if self.soft_cap is None else {"soft_cap": self.soft_cap}
        shape = self.queries, self.queries, self.heads, self.head_dim
        with jax.enable_x64(self.dtype == jnp.float64):
            step = StepCase(*shape, batch=1).abstract(self.dtype)
            for name in self.passes:
                run = functools.partial(PASSES[name], backend, 0.1, None, **cap)
                with pytest.raises(self.error, match=self.words):
                    jax.eval_shape(run, step)


def refusals_of(kind: str, **names: Any) -> dict[str, Refusal]:
    """Returns the refusals of a kind in kernels.txt, whose values have these names."""
    names |= {"jnp": jnp, "Wrong": ValueError, "Missing": NotImplementedError}
    return {
        name: Refusal(error, words, **fields)
        for name, error, fields, words in table("kernels.txt", kind, **names)
    }


def steps_of(*kinds: str, **names: Any) -> dict[str, tuple[StepCase, jnp.dtype]]:
    """Returns the steps of some kinds in kernels.txt, whose values have these names.

    TILE: rows and keys of a large tile. SIZES: where there are many keys.
    """
    names |= {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}
    names |= {"BlockSizes": BlockSizes}
    rows = (x for kind in kinds for x in table("kernels.txt", f"step-{kind}", **names))
    return {
        name: (StepCase(queries, keys, **more), dtype)
        for name, queries, keys, dtype, more in rows
    }


class BackendSuite:
    """Tests of a backend; whatever it says of races fails them.

    implementation: its name in `IMPLEMENTATIONS`.
    backend: as it is tested here, in tiles of which short problems have several.
    cases: name -> shapes and type; each group, head size, type and odd length, with a
      carry and without, in a few programs. "far more queries" has a carry and more than
      two query tiles.
    slow_cases: names of those whose kernels others run too, in other shapes.
    groups, head_dims, types, longest: of random steps, tested slowly.
    draws_type: whether a random step is computed in one of the types only.
    dtype, tolerance: of the steps with masked tiles.
    carry_tolerance: relative error of a carry in tiles that see nothing.
    is_slow: whether the steps with masked tiles are slow tests.
    """

    implementation: str
    backend: Backend
    cases: dict[str, tuple[StepCase, jnp.dtype]]
    slow_cases: tuple[str, ...] = ()
    refusals: dict[str, Refusal] = {}
    tiles: Groups
    groups: tuple[int, ...] = (1, 2, 3, 8)
    head_dims: tuple[int, ...] = (64, 100, 128, 256)
    types: tuple[jnp.dtype, ...] = (jnp.float32, jnp.bfloat16)
    longest: int = 512
    draws_type: bool = False
    dtype: jnp.dtype = jnp.float32
    tolerance: float = FLOAT32_TOLERANCE
    carry_tolerance: float = 1e-6
    is_slow: bool = False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        slow = [pytest.mark.slow] if self.is_slow else []
        values = {
            "case": [
                pytest.param(
                    x,
                    id=name,
                    marks=[pytest.mark.slow] * (name in self.slow_cases),
                )
                for name, x in self.cases.items()
            ],
            "refusal": [pytest.param(x, id=name) for name, x in self.refusals.items()],
            "tiles": [pytest.param(self.tiles, id="tiles", marks=slow)],
            "group": self.groups,
            "head_dim": self.head_dims,
        }
        for name in values:  # in one order, the same in every worker
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values[name])

    @pytest.fixture(autouse=True)
    def races(self, capfd):
        yield
        assert "RACE DETECTED" not in capfd.readouterr().out

    def results(
        self, case: StepCase, step: Step, dtype: jnp.dtype | None = None
    ) -> Answer:
        run = shared(self.backend, case.scale, case.sizes, case.soft_cap)
        return answer(
            jax.block_until_ready(run(step.astype(dtype or self.dtype))), step
        )

    def test_step_is_as_exact_as_the_reference(self, case, rng):
        assert_true(rng, self.backend, *case)

    @pytest.mark.slow
    @pytest.mark.parametrize("bound_rows", [1, 2])
    def test_step_of_any_shape_equals_the_reference(
        self, bound_rows, head_dim, group, rng
    ):
        case = StepCase.of_any_length(rng, self.longest, group, head_dim, bound_rows)
        types = [rng.choice(self.types)] if self.draws_type else self.types
        for dtype in types:
            assert_true(rng, self.backend, case, dtype)

    @pytest.mark.thorough
    def test_masked_keys_and_rows_that_see_nothing_are_never_computed(self, tiles, rng):
        """They are nan, and 0 · nan is nan: nothing of them may be multiplied."""
        step = tiles.step(rng, self.dtype, tiles.gaps)
        want = truth(tiles.case, step)
        visible = tiles.visible(step)
        empty = ~visible.any(axis=1)
        masked = ~any_in_block(visible.any(axis=0), tiles.granule)
        skipped = ~any_in_block(~empty, tiles.query_tile)
        assert masked.any() and skipped.any()
        step.k[:, masked] = step.v[:, masked] = np.nan
        step.q[:, skipped] = step.do[:, skipped] = np.nan
        got = self.results(tiles.case, step)
        assert max(got.errors(want).values()) <= self.tolerance
        for gradient in got.dk, got.dv:
            np.testing.assert_array_equal(gradient[:, masked], 0)
        for x in got.out, got.dq:
            np.testing.assert_array_equal(x[:, empty], 0)
        np.testing.assert_array_equal(got.lse[..., empty], -np.inf)

    def test_nan_in_a_key_shows_in_every_row_that_sees_it_and_in_no_other(
        self, tiles, rng
    ):
        """In full tiles too, where nothing is masked."""
        step = tiles.step(rng, self.dtype, tiles.aligned)
        want = self.results(tiles.case, step)
        step.k[:, tiles.slot] = np.nan
        got = self.results(tiles.case, step)
        sees = tiles.visible(step)[:, tiles.slot]
        assert sees.any() and not sees.all()
        for name, axis in (("out", 1), ("lse", 2), ("dq", 1)):
            rows, clean = (np.moveaxis(getattr(x, name), axis, 0) for x in (got, want))
            np.testing.assert_array_equal(is_nan(rows), sees)
            np.testing.assert_array_equal(rows[~sees], clean[~sees])

    @pytest.mark.thorough
    def test_nan_in_a_gradient_of_out_shows_in_what_its_row_sees_and_nowhere_else(
        self, tiles, rng
    ):
        step = tiles.step(rng, self.dtype, tiles.aligned)
        row = len(tiles.aligned) // 2 * tiles.rows + 5
        step.do[:, row] = np.nan
        got = self.results(tiles.case, step)
        visible = tiles.visible(step)[row]
        assert np.flatnonzero(is_nan(got.dq.swapaxes(0, 1))).tolist() == [row]
        for gradient in got.dk, got.dv:
            np.testing.assert_array_equal(is_nan(gradient.swapaxes(0, 1)), visible)

    @pytest.mark.thorough
    def test_rows_that_see_nothing_keep_their_carry_and_contribute_nothing(self, rng):
        """Those of a tile of which others see all keys, and whole tiles of them."""
        case, dtype = self.cases["far more queries"]
        assert case.has_carry and case.queries > 2 * self.tiles.query_tile
        step = case.draw(rng, dtype)
        row, tile = np.arange(case.queries), self.tiles.query_tile
        empty = row < tile + tile // 2 + 5
        k_end = np.where(empty, 0, np.full_like(step.k_end, case.keys))
        step = step._replace(k_start=np.zeros_like(step.k_start), k_end=k_end)
        got = self.results(case, step, dtype)
        assert max(got.errors(truth(case, step)).values()) <= self.tolerance
        np.testing.assert_array_equal(got.dq[:, empty], 0)
        out, lse = step.carry
        assert np.isneginf(lse[..., empty]).any() and (lse[..., empty] > -np.inf).any()
        for rows, rtol in (empty, 1e-6), (row < tile, self.carry_tolerance):
            np.testing.assert_allclose(got.out[:, rows], out[:, rows], rtol)
            np.testing.assert_allclose(got.lse[..., rows], lse[..., rows], rtol)

    @pytest.mark.thorough(quick=99)
    def test_what_there_is_no_kernel_for_is_refused(self, refusal, monkeypatch):
        """Before a kernel is launched."""
        monkeypatch.setattr(pl, "pallas_call", lambda *_, **__: pytest.fail("launched"))
        refusal.check(refusal.backend or self.backend)


def any_in_block(x: np.ndarray, size: int) -> np.ndarray:
    """For each of x (n,), whether any of its block of `size` is true."""
    blocks = np.pad(x, (0, -len(x) % size)).reshape(-1, size)
    return blocks.any(axis=1).repeat(size)[: len(x)]


def is_nan(rows: np.ndarray) -> np.ndarray:
    """Which of the rows (n, …) hold a nan."""
    return np.isnan(rows).reshape(len(rows), -1).any(axis=1)
