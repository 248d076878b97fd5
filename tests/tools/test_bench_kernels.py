from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools import bench_kernels
from tools.bench_kernels import Problem
from tools.lib.benchmarks import peers
from tools.lib.benchmarks.peers import Operands, Runs, Unavailable, jax_runs
from tools.lib.benchmarks.rows import Environment, Times

TINY = "--lengths 96 --head-dims 16 --heads 2 --kv-heads 1 --repeats 1 --calls 2"
CHOSEN = "--contestants blockwise cudnn reference --dtypes float32 --masks causal full"

KEYS = {field.name for part in (Environment, Times, Problem) for field in fields(part)}
KEYS |= {"contestant", "direction", "calls", "error"}
KEYS |= {"tflops", "flops_convention", "peak_share"}


@pytest.fixture(scope="module")
def rows(rows_of):
    return rows_of(bench_kernels, *TINY.split(), *CHOSEN.split())


@pytest.mark.thorough
def test_each_direction_of_each_contestant_that_is_there_has_a_row(rows):
    assert [(row["mask"], row["contestant"], row["direction"]) for row in rows] == [
        (mask, name, direction)
        for mask in ("causal", "full")
        for name in ("blockwise", "reference")
        for direction in ("forward", "backward")
    ]
    assert all(row.keys() == KEYS for row in rows)
    assert 0 < max(row["error"] for row in rows) < 1e-5


def test_an_error_is_seen():
    truth = [np.ones((2, 3), np.float32)]
    runs = Runs(lambda: (jnp.ones((2, 3)).at[0, 0].set(2.0),), None)
    found = bench_kernels.largest_error(runs, "forward", truth)
    assert found == pytest.approx(6**-0.5)


@pytest.mark.parametrize(
    ("peer", "why"),
    [
        (peers.cudnn, "RuntimeError: cuDNN not found"),
        (peers.mosaic_gpu, "float16, not bfloat16"),
    ],
)
def test_a_peer_that_cannot_run_says_why(peer, why):
    with pytest.raises(Unavailable, match=why):
        peer(Operands(*(jnp.ones((1, 64, 1, 64), jnp.bfloat16),) * 4), True)


def test_a_backward_run_gives_the_gradients_of_the_forward_run():
    x = jax.random.normal(jax.random.key(0), (4, 1, 8, 2, 4))
    runs = jax_runs(lambda q, k, v: q * k + v, Operands(*x))
    (out,), (dq, dk, dv) = runs.forward(), runs.backward()
    np.testing.assert_allclose(out, x[0] * x[1] + x[2], rtol=1e-6)
    for got, want in ((dq, x[3] * x[1]), (dk, x[3] * x[0]), (dv, x[3])):
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_splash_is_given_the_same_problem(mask):
    """Interpreted; on a TPU the same runs are compiled."""
    problem = Problem(128, 128, "float32", mask, 1, 2, 2)
    operands = problem.draw()
    is_causal = mask == "causal"
    found = peers.splash(operands, is_causal, interpret=True)
    exact = peers.ours("reference", operands, is_causal)
    for direction in bench_kernels.DIRECTIONS:
        truth = jax.device_get(getattr(exact, direction)())
        assert bench_kernels.largest_error(found, direction, truth) < 1e-2
    with pytest.raises(peers.Unavailable, match="runs on TPUs"):
        peers.splash(operands, is_causal)


@pytest.mark.parametrize(
    "device, contestants",
    [
        ("tpu", "pallas_tpu splash"),
        ("gpu", "hopper triton"),
        ("cpu", "blockwise"),
    ],
)
def test_without_arguments_the_kernels_of_the_device_are_measured(
    device, contestants, monkeypatch
):
    monkeypatch.setattr(jax, "default_backend", lambda: device)
    chosen = bench_kernels._arguments([])
    names = contestants.split()
    assert chosen.contestants[: len(names)] == names
    assert (max(chosen.lengths) > 1024) == (device != "cpu")
