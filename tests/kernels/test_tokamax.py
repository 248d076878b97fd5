"""How the kernels of tokamax are called, which stand-ins compute: see `TestTokamax`."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends import reference, tokamax_gpu
from kernels.backends.steps import Rows
from kernels.backends.tokamax_gpu import launch
from kernels.masks import Visible
from kernels.precision import Scores
from tests.cases import lines
from tests.cases.attention import Case
from tests.support import simulated_tokamax, tokamax_signatures
from tests.support.rings import assert_as_on_one_device
from tests.support.simulated_tokamax import SIMULATED_TOKAMAX
from tests.support.steps import StepCase, answer, run, run_forward, shared, truth

F32, BF16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)


def test_stand_ins_have_the_signatures_of_the_version_that_is_named():
    """Those of the installed one too, if there is one."""
    root = pathlib.Path(__file__).parents[2]
    for file in "pyproject.toml", "requirements/tokamax.txt", "docs/kernels/tokamax.md":
        assert tokamax_gpu.TESTED in (root / file).read_text()
    recorded = lines("tokamax.txt")
    parameters = dict(line.split(": ") for line in recorded)
    for module, name in tokamax_signatures.MODULES.items():
        stand_in = getattr(simulated_tokamax, name)
        called = tokamax_signatures.signature(stand_in)
        assert parameters[f"{module} {name}"] == called
        kind, _, generation = module.rpartition("_")
        tiles = launch.tiles(generation, 128, is_capped=False)
        fields = parameters[f"{module} Config"].split()
        configs = [tiles.forward] if kind == "kernel" else tiles[1:]
        assert all(fields.count(key) for config in configs for key in config)
    if tokamax_gpu.installed_version() == tokamax_gpu.TESTED:
        assert tokamax_signatures.installed() == recorded


@pytest.mark.parametrize("version", [None, "0.0.18"])
def test_another_version_is_refused(monkeypatch, version):
    monkeypatch.setattr(launch, "device_kind", lambda: "NVIDIA B200")
    monkeypatch.setattr(launch, "installed_version", lambda: version)
    words = rf"must be 0\.0\.17, got {version}: pip install 'annulus-attention"
    with pytest.raises(NotImplementedError, match=words):
        launch.installed()


@pytest.mark.thorough(quick=3)
@pytest.mark.parametrize("layout_name", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("mask_name", ["causal", "window", "documents"])
def test_a_ring_is_exact_but_for_the_roundings(
    layout_name, mask_name, rng, monkeypatch
):
    """In float32, which the kernels do not multiply, stand-ins round nothing."""
    monkeypatch.setattr(launch, "TYPES", (F32,))
    case = Case(4, layout_name, mask_name, 2, 300, 64)
    assert_as_on_one_device(rng, case, SIMULATED_TOKAMAX, F32)


@pytest.mark.parametrize(
    "k_start, k_end, is_triangle",
    [
        ((0, 0, 0, 0), (1, 2, 3, 4), True),
        ((0, 0, 0, 0), (0, 1, 2, 3), True),
        ((0, 0, 0, 0), (1, 2, 3, 5), False),
        ((4, 4, 0, 0), (4, 4, 3, 4), True),  # of rows that see nothing
        ((0, 0, 0, 0), (0, 0, 4, 4), False),
    ],
)
def test_a_backward_skips_tiles_only_where_no_query_sees_a_later_slot(
    k_start, k_end, is_triangle, rng
):
    x = jnp.ones((1, 4, 1, 64), BF16)
    row = jnp.ones((1, 1, 4), F32)
    visible = Visible(np.array([k_start]), np.array([k_end]))
    steps = SIMULATED_TOKAMAX.backward_steps(
        Rows(x, x, row, row), x, visible, Scores(1.0)
    )
    assert bool(steps.prepare(*visible)[2]) == is_triangle


@pytest.mark.parametrize("dtype", tokamax_gpu.TYPES)
def test_a_gradient_of_lse_alone_is_not_lost(dtype, rng):
    """Where that of out is 0, no `out` has a product with it."""
    case = StepCase(130, 130)
    step = case.draw(rng, dtype)
    step.do[:, ::2] = 0
    compiled = shared(SIMULATED_TOKAMAX, case.scale)
    got = answer(compiled(step.astype(dtype)), step)
    errors = got.errors(truth(case, step))
    assert all(error <= 1e-2 for error in errors.values()), errors


def test_plans_find_the_kernels_by_the_names_of_ours():
    both = functools.partial(run, SIMULATED_TOKAMAX, 0.1, None)
    step = StepCase(130, 130).abstract(BF16)
    text = jax.jit(both).lower(step).as_text(debug_info=True)
    assert "flash_forward/" in text and "flash_backward/" in text


def test_causal_bounds_with_more_keys_than_queries_leave_nothing_unwritten(rng):
    """With `is_causal` no tile writes dk and dv of the last keys."""
    case = StepCase(77, 300)
    step = case.draw(rng, BF16)
    k_end = np.arange(1, 78, dtype=np.int32)[None]
    step = step._replace(k_start=np.zeros_like(k_end), k_end=k_end)
    compiled = shared(SIMULATED_TOKAMAX, case.scale)
    errors = answer(compiled(step.astype(BF16)), step).errors(truth(case, step))
    assert all(error <= 1e-2 for error in errors.values()), errors


def test_a_scale_of_zero_weighs_all_keys_alike(rng):
    case = StepCase(8, 128, scale=0.0)
    step = case.draw(rng, BF16).astype(BF16)
    out, lse = run_forward(SIMULATED_TOKAMAX, 0.0, None, step)
    want, _ = run_forward(reference, 0.0, None, step)
    np.testing.assert_allclose(out, want, atol=1e-2)
    seen = np.asarray(step.k_end - step.k_start)[0]
    np.testing.assert_allclose(np.exp(lse[0, 0]), seen.clip(0), rtol=1e-4)
