"""Other people's attention kernels, to be timed with ours in one process.

Each is given operands and hands back two runs, forward and backward, that compute the
same as ours. What does not do what is asked says so.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from kernels import masks
from kernels.one_device import attention
from tools.lib.benchmarks.problems import Operands


class Unavailable(Exception):
    """It refuses the problem; the message says why."""


@dataclass(frozen=True)
class Runs:
    """A problem, ready to be run.

    forward, backward: start the computation of (out,), or of dq, dk and dv from what a
      forward pass has left, (B, T, …) each.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def jax_runs(attend: Attend, operands: Operands) -> Runs:
    """Compiles a JAX function, and returns its runs.

    Raises:
      Unavailable: it cannot be compiled or run.
    """
    q, k, v, d_out = operands
    try:
        forward = jax.jit(attend).lower(q, k, v).compile()
        _, pull = jax.jit(lambda *qkv: jax.vjp(attend, *qkv))(q, k, v)
        backward = jax.jit(lambda pull, d_out: pull(d_out)).lower(pull, d_out).compile()
        return Runs(lambda: (forward(q, k, v),), lambda: backward(pull, d_out))
    # Libraries refuse in every way, failed assertions included.
    except Exception as error:
        lines = str(error).splitlines() or [""]
        raise Unavailable(f"{type(error).__name__}: {lines[0]}") from error


def ours(implementation: str, operands: Operands, is_causal: bool) -> Runs:
    """Compiles one of `kernels.backends`."""
    visible = masks.causal() if is_causal else masks.full()
    run = functools.partial(attention, visible=visible, implementation=implementation)
    return jax_runs(run, operands)


def cudnn(operands: Operands, is_causal: bool) -> Runs:
    """NVIDIA's cuDNN, through JAX."""
    options = {"is_causal": is_causal, "implementation": "cudnn"}
    attend = functools.partial(jax.nn.dot_product_attention, **options)
    return jax_runs(attend, operands)


def splash(operands: Operands, is_causal: bool, interpret: bool = False) -> Runs:
    """JAX's splash attention for TPUs, in tiles of up to 1024 x 1024.

    interpret: runs it without a TPU.
    """
    place = "jax.experimental.pallas.ops.tpu.splash_attention"
    kernel, masks_of = (
        importlib.import_module(f"{place}.splash_attention_{part}")
        for part in ("kernel", "mask")
    )
    length, heads, depth = operands.q.shape[1:]
    if not (interpret or jax.default_backend() == "tpu"):
        raise Unavailable("it runs on TPUs")
    one = (masks_of.CausalMask if is_causal else masks_of.FullMask)((length, length))
    block = min(1024, length)
    sizes = "block_q", "block_kv", "block_kv_compute"
    sizes += "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"
    blocks = dict.fromkeys(sizes, block) | {"use_fused_bwd_kernel": True}
    options = {"head_shards": 1, "q_seq_shards": 1, "interpret": interpret}
    options["block_sizes"] = kernel.BlockSizes(**blocks)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        splash = kernel.make_splash_mha(
            masks_of.MultiHeadMask([one] * heads), **options
        )
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q * depth**-0.5, k, v))
        return jax.vmap(splash)(q, k, v).transpose(0, 2, 1, 3)  # (B, T, H, D)

    return jax_runs(attend, operands)


PEERS: dict[str, Callable[[Operands, bool], Runs]] = {
    "cudnn": cudnn,
    "splash": splash,
}
