"""tokamax's kernels in plain jnp: its signatures, roundings, and what it leaves out.

They show that `launch` calls the kernels rightly, and nothing of the kernels.
"""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from kernels.backends import reference
from kernels.backends.tokamax_gpu.launch import Launch, Modules


def flash_attention_kernel(
    q,
    k,
    v,
    bias,
    mask,
    k_start,
    k_end,
    *,
    is_causal,
    logits_soft_cap,
    logits_scale,
    out_dtype,
    normalize_output,
    return_residuals,
    use_stable_softmax,
    rescale_threshold,
    config,
):
    """Attends from q (T, H, D) to whole tiles of k and v; out and (m, l), (H, T)."""
    assert bias is None and mask is None and not is_causal
    assert normalize_output and return_residuals and use_stable_softmax
    # Maxima are taken before scores, some of them -inf, are scaled.
    assert rescale_threshold == 1 and logits_scale > 1e-38
    whole = k.shape[0] // config.block_kv * config.block_kv
    out, lse = reference.forward(
        q[None],
        k[None, :whole],
        v[None, :whole],
        k_start,
        k_end,
        scale=logits_scale,
        soft_cap=logits_soft_cap,
    )
    is_empty = lse[0] == -jnp.inf
    m = jnp.where(is_empty, -jnp.inf, lse[0] - 0.5)
    return out[0].astype(out_dtype), (m, jnp.where(is_empty, 0, jnp.exp(0.5)))


def flash_attention_vjp_kernel(
    q,
    k,
    v,
    residuals,
    out,
    dout,
    bias,
    mask,
    k_start,
    k_end,
    *,
    logits_scale,
    logits_soft_cap,
    is_causal,
    ds_dtype,
    config,
):
    """Returns dq, dk, dv in the type of q; what no tile writes is nan."""
    assert bias is None and mask is None and ds_dtype is None
    highest, total = residuals
    product = out.astype(jnp.float32) * dout.astype(jnp.float32)  # (T, H, D)
    if is_causal:
        k_end = jnp.minimum(k_end, jnp.arange(1, q.shape[0] + 1))
    dq, dk, dv = reference.backward(
        q[None],
        k[None],
        v[None],
        dout[None],
        (highest + jnp.log(total))[None],
        product.sum(-1).T[None],
        k_start,
        k_end,
        scale=logits_scale,
        soft_cap=logits_soft_cap,
        dq=jnp.zeros((1, *q.shape), jnp.float32),
    )
    if is_causal:
        tile = config.block_kv_dkv
        written = jnp.arange(k.shape[0]) < -(-q.shape[0] // tile) * tile
        dk = jnp.where(written[:, None, None], dk, jnp.nan)
        dv = jnp.where(written[:, None, None], dv, jnp.nan)
    scaled = dq[0] * logits_scale, dk[0] * logits_scale, dv[0]
    return *jax.tree.map(lambda x: x.astype(q.dtype), scaled), None


# This module takes the place of both of tokamax's.
Config = SimpleNamespace
SIMULATED_TOKAMAX = Launch(
    Modules("sm100", sys.modules[__name__], sys.modules[__name__])
)
