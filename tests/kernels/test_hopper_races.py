"""The waits of the Hopper kernels: each that is left out is reported.

Pallas simulates a GPU's shared memory and barriers here, and reports what reads or
writes without an order between them. That nothing is reported of the kernels as they
are is in `test_backends`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.backends.hopper import backward, backward_dq, forward
from kernels.backends.hopper.launch import Launch
from tests.cases import in_tiers
from tests.support.simulated_hopper import RACES, run_without_wait
from tests.support.steps import Step, StepCase, compiled, run_backward, run_forward

BACKEND = Launch((64, 2, 2), RACES)
DETERMINISTIC = Launch(interpret=RACES, is_deterministic=True)

COUNTS = {
    "forward": {
        **{"q_full": 1, "schedule": 2},
        **{"k_full": 2, "v_full": 2, "k_empty": 3, "v_empty": 3},
    },
    "backward": {
        **{"k_full": 1, "v_full": 1, "q_full": 1, "do_full": 1},
        **{"q_empty": 2, "do_empty": 2, "ds_exchange": 2},
    },
    "dq": {
        **{"q_full": 1, "do_full": 1, "k_full": 2, "v_full": 1},
        **{"k_empty": 3, "v_empty": 3},
    },
}


CASES = {
    "forward": StepCase(128, 512, group=1, batch=1),
    "backward": StepCase(256, 128, group=1, head_dim=128, batch=1),
    "dq": StepCase(128, 384, group=1, head_dim=128, batch=1),
}
KERNELS = {"forward": forward, "backward": backward, "dq": backward_dq}


def simulate(which: str, step: Step) -> None:
    """Runs one pass, traced for this run."""
    backend = DETERMINISTIC if which == "dq" else BACKEND
    run = run_forward if which == "forward" else run_backward
    program = compiled(backend, CASES[which].scale, run=run)
    jax.block_until_ready(program(step))


@pytest.mark.thorough(quick=1)
@pytest.mark.parametrize(
    "which, name, barrier, number", in_tiers("kernels.txt", "wait")
)
def test_a_wait_that_is_left_out_is_reported(
    which, name, barrier, number, monkeypatch, capfd, rng
):
    """So that the tests of all backends could fail."""
    step = CASES[which].draw(rng, jnp.bfloat16)
    k_end = np.full_like(step.k_end, CASES[which].keys)
    step = step._replace(k_start=np.zeros_like(k_end), k_end=k_end).astype(jnp.bfloat16)
    waits, failure = run_without_wait(
        KERNELS[which], barrier, number, lambda: simulate(which, step), monkeypatch
    )
    assert waits == COUNTS[which]
    assert "phase" in failure or "RACE DETECTED" in capfd.readouterr().out
