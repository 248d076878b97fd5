"""Gated DeltaNet's token mixing over a ring: convolution, gated delta rule, state.

Each device runs the rule over its own tokens as an affine map of the state before
them, `Runs.states` composes the maps of all devices, and what queries read of their
state is added. Of the tokens before a run only the convolution's last ones travel.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from ..backends import check_implementation
from ..checks import checked_axes
from ..layouts import Layout, check_length
from ..placement import resharded
from ..precision import product
from . import tpu
from .rule import after, gated_delta, normalised, short_convolution
from .runs import SAVED, Runs
from .segments import gated_delta_in_segments

Triple = tuple[jax.Array, jax.Array, jax.Array]
"""Of queries, keys and values: tokens (B, T, H, D), or kernels (W, H, D) of each."""


def make_delta_attention(
    mesh: Mesh,
    *,
    layout: Layout,
    ring_axes: str | tuple[str, ...] = ("ring",),
    batch_axes: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[()] | None = None,
    ulysses_axis: str | None = None,
    segment: int = 0,
    implementation: str | Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Builds the mixing on global arrays; arguments as of `make_ring_attention`.

    segment: tokens of a run whose terms the backward holds at a time, in XLA; 0 for
      all. The kernels hold those of a chunk.
    implementation: None or "pallas_tpu" for the kernels on a TPU, in XLA where they do
      not apply; another backend's name for XLA; or a function with the signature of
      `gated_delta`, which gets q, k and v in the type of v.

    A device's tokens must be runs of consecutive ones, each as long at least as what
    the convolution reads before a token: contiguous shards, zigzag, or wide stripes.

    Returns:
      mix(qkv, kernels, log_decay, beta, positions, with_state=False) -> out, or out and
      the state (B, H, D, V) float32 after the last token. qkv: q and k (B, T, K, D) and
      v (B, T, H, V), before their convolutions with `kernels`, in layout order.
      log_decay, beta: float32 (B, T, H), as of `gated_delta`. positions: int32 (B, T),
      in documents, whose first tokens see nothing before them. out: (B, T, H, V), as v.
    """
    if not callable(implementation):
        check_implementation(implementation)
    axes = checked_axes(mesh, ring_axes, batch_axes, head_axis, ulysses_axis)
    choose_rule = functools.partial(_chosen_rule, implementation, segment)
    ring = math.prod(mesh.shape[axis] for axis in axes.ring)
    slices = math.prod(mesh.shape[axis] for axis in axes.tokens) // ring

    def mix(
        qkv: Triple,
        kernels: Triple,
        log_decay: jax.Array,
        beta: jax.Array,
        positions: jax.Array,
        with_state: bool = False,
    ) -> Any:
        reach = len(kernels[0]) - 1
        tokens = positions.shape[1]
        runs = checked_runs(layout, ring, tokens, slices, reach, axes.tokens)
        array = PartitionSpec(axes.batch, axes.tokens, axes.heads)
        kernel = PartitionSpec(None, axes.heads)
        specs = (array,) * 3, (kernel,) * 3, array, array, PartitionSpec(*array[:2])
        state = PartitionSpec(axes.batch, axes.heads)
        sharded = jax.shard_map(
            functools.partial(_of_shard, runs, choose_rule, with_state),
            mesh=mesh,
            in_specs=specs,
            out_specs=(array, state) if with_state else array,
            check_vma=False,
        )
        operands = qkv, kernels, log_decay, beta, positions
        return sharded(*resharded(mesh, specs, operands))

    return mix


def checked_runs(
    layout: Layout,
    ring_size: int,
    tokens: int,
    slices: int,
    reach: int,
    axes: tuple[str, ...] = (),
) -> Runs:
    """Returns the runs of a sequence's shards, as `Runs.of`.

    reach: tokens that the convolution reads before a token.

    Raises:
      ValueError: the tokens do not divide, or the layout leaves shorter runs.
    """
    check_length(layout, ring_size, tokens, slices)
    runs = Runs.of(layout, ring_size, tokens, slices, axes)
    if runs.devices > 1 and runs.length < reach:
        raise ValueError(
            f"{layout} leaves runs of {runs.length} tokens on a device, and the "
            f"convolution of Gated DeltaNet reads {reach} before a token: set "
            "attention=zigzag or ring, or a wider stripe_granule"
        )
    return runs


def _chosen_rule(
    implementation: str | Callable[..., Any] | None,
    segment: int,
    keys: tuple[int, ...],
    values: int,
    dtype: jnp.dtype,
) -> tuple[Callable[..., Any], jnp.dtype]:
    """Returns the rule for a problem, and the type in which it gets q, k and v.

    Arguments as of `make_delta_attention` and `tpu.best`.
    """
    if callable(implementation):
        return implementation, dtype
    in_xla = implementation not in (None, "pallas_tpu")
    kernel = None if in_xla else tpu.best(keys, values, dtype)
    if kernel is None:
        in_segments = functools.partial(gated_delta_in_segments, segment)
        return in_segments, jnp.dtype(jnp.float32)
    return kernel, dtype


def _of_shard(
    runs: Runs,
    choose_rule: Callable[..., tuple[Callable, jnp.dtype]],
    with_state: bool,
    qkv: Triple,
    kernels: Triple,
    log_decay: jax.Array,
    beta: jax.Array,
    positions: jax.Array,
) -> Any:
    """Mixes a device's tokens, as `make_delta_attention` says."""
    *x, log_decay, beta, positions = map(runs.cut, (*qkv, log_decay, beta, positions))
    first = runs.length - (len(kernels[0]) - 1)  # of what the next run reads
    tails = [checkpoint_name(runs.moved(part[:, :, first:]), SAVED) for part in x]
    q, k, v = convolved(x, tails, kernels, positions)
    depth = k.shape[-1]
    values = v.shape[-1]
    is_alone = runs.devices == 1
    # Of the state before a run, if it is not known, the identity stands for it.
    start = jnp.eye(depth, values + depth * (not is_alone), values)
    rule, operand_type = choose_rule(k.shape, values, qkv[2].dtype)
    q, k, v = (x.astype(operand_type) for x in (q, k, v))
    out, state = rule(q, k, v, log_decay, beta, positions == 0, start)
    out = out.astype(jnp.float32)
    if not is_alone:
        maps = state
        starts = runs.states(maps)  # (B, slots, H, D, V), before each run
        # What queries read is linear in the state before the run: `read` is the matrix
        # that it is multiplied by.
        known, read = jnp.split(out, [values], axis=-1)
        out = known + product("brthd,brhdv->brthv", read, starts)
        state = after(maps, starts)
    out = out.reshape(*qkv[2].shape).astype(qkv[2].dtype)
    out = checkpoint_name(out, SAVED)
    return (out, runs.last(state)) if with_state else out


def convolved(
    qkv: Any, before: Any, kernels: Triple, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns q and k, normalised, and v: float32.

    As of `short_convolution`; queries are scaled by D^-0.5.
    """
    parts = zip(qkv, before, kernels, strict=True)
    q, k, v = (short_convolution(*part, positions) for part in parts)
    return normalised(q) * q.shape[-1] ** -0.5, normalised(k), v


def advance(
    qkv: Triple,
    kernels: Triple,
    log_decay: jax.Array,
    beta: jax.Array,
    held: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Mixes the next tokens of rows, and returns what is held for those after them.

    held: the state (B, H, D, V), and the convolution's last inputs, of qkv each,
      (B, W - 1, heads, size). Other arguments, and out, as of `make_delta_attention`,
      of all tokens on one device; XLA may shard rows and heads.
    """
    state, *tails = held
    # A position beyond the convolution's reach: no token here begins a document.
    after_all = jnp.full(beta.shape[:2], len(kernels[0]), jnp.int32)
    q, k, v = convolved(qkv, tails, kernels, after_all)
    out, state = gated_delta(q, k, v, log_decay, beta, after_all == 0, state)
    tokens = beta.shape[1]
    pairs = zip(tails, qkv, strict=True)
    tails = (jnp.concatenate(pair, axis=1)[:, tokens:] for pair in pairs)
    return out.astype(qkv[2].dtype), (state, *tails)
