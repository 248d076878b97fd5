"""Other people's attention kernels, to be timed with ours in one process.

Each is given operands and hands back two runs, forward and backward, that compute the
same as ours. What is not installed, or does not do what is asked, says so.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kernels import masks
from kernels.one_device import attention
from tools.lib.benchmarks.problems import Operands


class Unavailable(Exception):
    """It is not installed, or refuses the problem; the message says which."""


@dataclass(frozen=True)
class Runs:
    """A problem, ready to be run.

    forward, backward: start the computation, and return what `wait` waits for. The
      backward begins from what a forward pass has left, and gives dq, dk and dv.
    results: NumPy arrays of forward, (out,), or backward, (B, T, …) each.
    """

    forward: Callable[[], Any]
    backward: Callable[[], Any]
    wait: Callable[[Any], Any] = jax.block_until_ready
    results: Callable[[Any], list[np.ndarray]] = jax.device_get


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


def tokamax(operands: Operands, is_causal: bool) -> Runs:
    """Google's kernel library."""
    options = {"is_causal": is_causal, "implementation": "mosaic"}
    dot_product_attention = _imported("tokamax").dot_product_attention
    return jax_runs(functools.partial(dot_product_attention, **options), operands)


def torch_sdpa(kind: str, operands: Operands, is_causal: bool) -> Runs:
    """PyTorch's scaled dot product attention; kind: flash_attention or cudnn_attention.

    Its operands are (B, H, T, D) in memory, as it wants them.
    """
    torch = _imported("torch")
    if not torch.cuda.is_available():
        raise Unavailable("torch finds no GPU")
    attention_module = importlib.import_module("torch.nn.attention")
    chosen = attention_module.SDPBackend.__members__[kind.upper()]
    q, k, v, d_out = (
        torch.from_dlpack(x).transpose(1, 2).contiguous() for x in operands
    )
    for x in (q, k, v):
        x.requires_grad_()

    def attend() -> Any:
        with attention_module.sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=is_causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    def forward() -> Any:
        with torch.no_grad():
            return (attend(),)

    try:
        out = attend()
    except RuntimeError as error:
        raise Unavailable(str(error).splitlines()[0]) from error
    return Runs(
        forward,
        lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True),
        lambda _: torch.cuda.synchronize(),
        lambda results: [x.transpose(1, 2).float().cpu().numpy() for x in results],
    )


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
    "tokamax": tokamax,
    "torch_flash": functools.partial(torch_sdpa, "flash_attention"),
    "torch_cudnn": functools.partial(torch_sdpa, "cudnn_attention"),
    "splash": splash,
}


def _imported(name: str) -> Any:
    if importlib.util.find_spec(name.split(".")[0]) is None:
        raise Unavailable(f"{name} is not installed")
    return importlib.import_module(name)
