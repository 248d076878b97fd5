"""tokamax's kernels and rings of them, compiled for a described B200 by XLA and ptxas.

With `make venv ACCELERATOR="dev tokamax"`; nothing runs here.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels import Layout, Striped, Zigzag, causal, documents, make_ring_attention
from kernels.backends import IMPLEMENTATIONS, tokamax_gpu
from kernels.masks import Mask
from tests.support.mosaic_kernels import spilled
from tests.support.steps import StepCase, run
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.pods import compile_for, gpu_devices

pytestmark = pytest.mark.slow
FORWARD, DKV, DQ = "flash_attention_sm100", "sm100_dkv_kernel", "sm100_dq_kernel"


@pytest.fixture(autouse=True)
def installed():
    version = tokamax_gpu.installed_version()
    assert version == tokamax_gpu.TESTED, 'make venv ACCELERATOR="dev tokamax"'


@pytest.mark.parametrize("dtype", tokamax_gpu.TYPES)
@pytest.mark.parametrize("soft_cap", [None, 50.0])
@pytest.mark.parametrize("head_dim", [64, 100, 192])
def test_nothing_is_spilled(head_dim, soft_cap, dtype):
    case = StepCase(1001, 777, head_dim=head_dim, bound_rows=2, has_carry=True)
    mesh = Mesh(np.array(gpu_devices("b200")), ("device",))
    both = functools.partial(
        run, IMPLEMENTATIONS["tokamax"], 0.1, None, soft_cap=soft_cap
    )
    kernels = spilled(mesh, both, case.abstract(dtype))
    # One of each backward kernel with `is_causal`, and one without.
    assert kernels == [(FORWARD, 0), (DKV, 0), (DKV, 0), (DQ, 0), (DQ, 0)]


def described_ring(layout: Layout, mask: Mask):
    """Returns a mesh of four, gradients through its ring, and shapes of q, k and v."""
    mesh = Mesh(np.array(gpu_devices("b200", 4)), ("ring",))
    ring = make_ring_attention(mesh, layout=layout, implementation="tokamax")
    sharding = NamedSharding(mesh, PartitionSpec(None, "ring"))
    q = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16, sharding=sharding)
    k = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16, sharding=sharding)

    def squares(q, k, v):
        return jnp.square(ring(q, k, v, mask).astype(jnp.float32)).sum()

    return mesh, jax.grad(squares, (0, 1, 2)), (q, k, k)


def test_every_transfer_overlaps_the_kernels_of_its_step():
    """As with Hopper's; a conditional holds two pairs of backward kernels."""
    mesh, gradients, shapes = described_ring(Zigzag(), causal())
    text = compile_for(mesh, gradients, *shapes).as_text()
    (order,) = Program.parse(text, 4).orders()
    assert order == "sFd" * 3 + "F" + "BBBB" + "sBBBBd" * 4


@pytest.mark.parametrize("mask", [causal(), documents(np.arange(4096) // 999)])
@pytest.mark.parametrize("layout", [Striped(), Zigzag()])
def test_a_ring_with_gradients_compiles(layout: Layout, mask: Mask):
    mesh, gradients, shapes = described_ring(layout, mask)
    kernels = Counter(spilled(mesh, gradients, *shapes))
    # Four steps, and the local block's second half after them.
    assert kernels == {(FORWARD, 0): 4, (DKV, 0): 10, (DQ, 0): 10}
