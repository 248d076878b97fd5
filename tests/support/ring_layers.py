"""Layers of ring attention and nothing else, to be compiled and looked at."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from kernels import layouts as layout
from kernels import masks
from kernels.backends import Backend
from kernels.backends.hopper import backward as hopper_backward
from kernels.backends.hopper import backward_dq as hopper_dq
from kernels.backends.hopper import forward as hopper_forward
from kernels.backends.tpu import backward as tpu_backward
from kernels.backends.tpu import forward as tpu_forward
from kernels.ring import attend as ring
from kernels.ring.routes import ONE_WAY, Route
from tools.lib.compiled.hlo import TRANSFER, Program
from tools.lib.compiled.pods import compile_for

HEADS, HEAD_DIM, LAYERS = 2, 128, 2
SHARDED = PartitionSpec(None, "ring")
Attend = Callable[..., jax.Array]


KERNELS = tpu_forward, tpu_backward, hopper_forward, hopper_backward, hopper_dq


def compile_without_bodies(mesh: Mesh, program: Attend, *arguments: Any) -> Compiled:
    """Compiles what runs kernels, which do nothing: XLA schedules by what they declare.

    It takes a fifth of the time. That kernels compile is tested by themselves.
    """
    with contextlib.ExitStack() as stack:
        for module in KERNELS:
            nothing = mock.patch.object(module, "_kernel", lambda *_: None)
            stack.enter_context(nothing)
        return compile_for(mesh, program, *arguments)


def striped_attention(
    mesh: Mesh,
    backend: Backend,
    tokens: int,
    route: Route = ONE_WAY,
    mask: masks.Mask = masks.causal(),
) -> Attend:
    """Attention of global q, k and v, (1, N * tokens, H, D), on a striped ring.

    mesh: of one axis, "ring", of N devices.
    backend: the backend itself: by its name, tests get it interpreted.
    tokens: of each device.
    """
    length = mesh.size * tokens
    index = layout.order(layout.Striped(), mesh.size, length)
    bounds = [jnp.asarray(bound) for bound in mask(index, length).intervals()]
    sizes = "ring", mesh.size, layout.Striped(), HEAD_DIM**-0.5
    this_ring = ring.Ring(*sizes, backend, route=route)
    attend = jax.shard_map(
        lambda q, k, v, *bounds: ring.attend(this_ring, q, k, v, None, *bounds)[0],
        mesh=mesh,
        in_specs=(*(SHARDED,) * 3, *(PartitionSpec(None, None, "ring"),) * 2),
        out_specs=SHARDED,
        check_vma=False,
    )
    return lambda q, k, v: attend(q, k, v, *bounds)


def sharded_array(
    mesh: Mesh, tokens: int, heads: int, head_dim=HEAD_DIM, dtype=jnp.bfloat16
) -> jax.ShapeDtypeStruct:
    shape = 1, mesh.size * tokens, heads, head_dim
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, SHARDED))


def compiled_gradients(mesh: Mesh, backend: Backend, tokens: int) -> Compiled:
    """Compiles the gradients of `striped_attention` with two query heads a key's."""
    attend = striped_attention(mesh, backend, tokens)

    def gradients(q, k, v, d_out):
        return jax.vjp(attend, q, k, v)[1](d_out)

    q, k = (sharded_array(mesh, tokens, heads) for heads in (4, 2))
    return compile_without_bodies(mesh, gradients, q, k, k, q)


def layers_gradient(
    mesh: Mesh,
    backend: Backend,
    tokens: int,
    kv_heads=HEADS,
    route: Route = ONE_WAY,
    heads=HEADS,
    mask: masks.Mask = masks.causal(),
) -> tuple[Attend, tuple[jax.ShapeDtypeStruct, ...]]:
    """The gradient of LAYERS scanned layers, and what to compile it for.

    Layers save what the ring gives. Arguments as of `striped_attention`; kv_heads: that
    the query heads share.
    """
    attend = striped_attention(mesh, backend, tokens, route, mask)
    names = "attention_out", "attention_lse"
    saved = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=saved)
    def layer(x, weight):
        shared = x[:, :, :kv_heads]
        return attend(x * weight, shared + weight, shared - weight), None

    def loss(x, weights):
        out, _ = jax.lax.scan(layer, x, weights)
        return jnp.square(out.astype(jnp.float32)).sum()

    x = sharded_array(mesh, tokens, heads)
    return jax.grad(loss), (x, jax.ShapeDtypeStruct((LAYERS, HEAD_DIM), x.dtype))


def small_instructions(text: str, ring_size: int) -> float:
    """Counts what a ring step of a layer runs in its loops, forward and backward.

    Without transfers, kernels, what costs nothing, and additions of whole shards.
    """
    program, total = Program.parse(text, ring_size), 0
    busy = {
        name
        for name, found in program.computations.items()
        if {one.kind for one in found} & {"kernel", TRANSFER}
    }
    for name, found in program.computations.items():  # branches of branches
        if program.runs.get(name, 0) > LAYERS and (
            name in busy or any(busy.intersection(one.called) for one in found)
        ):
            operations = program.text[name].operations.values()
            total += program.runs[name] * sum(one.is_small for one in operations)
    return total / LAYERS / ring_size
