"""Compiles layers with ring attention, and prints what they send and wait for.

    python -m tests.support.natural_layers v5e 8
    python -m tests.support.natural_layers v4 4 --tokens 65536 --sizes 2560 20 5 0 \\
        --ways gather contiguous mirror

Two scanned layers with projections, RoPE and a feed-forward, forward and backward, that
save what attention gives. Kernels do nothing: XLA schedules by what they declare.
"""

import argparse
import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import layouts, masks
from kernels.backends import IMPLEMENTATIONS
from kernels.devices import chips
from kernels.devices.compiler import compiler_options
from kernels.devices.torus import ring_along
from kernels.ring_attention import make_ring_attention, ring_attention
from tests.support.ring_layers import LAYERS, compile_without_bodies, small_instructions
from tools.lib.compiled.hlo import Program
from tools.lib.compiled.pods import GPUS, gpu_devices, tpu_devices
from tools.lib.planning.estimate import cycles_per_second

HEAD_DIM = 128
WAYS = {
    "mirror": layouts.Mirror(),
    "contiguous": layouts.Contiguous(),
    "zigzag": layouts.Zigzag(),
    "gather": None,
}
"""Layouts of rings, zigzag's permuted on the host; None gathers keys and values."""

Attend = Callable[..., Any]


def attention_of(way: str, mesh: Mesh, backend: str, mask: masks.Mask) -> Attend:
    """Returns attention (q, k, v) over the mesh's "ring", of a way of WAYS."""
    kernels = IMPLEMENTATIONS[backend]
    layout = WAYS[way]
    if layout is not None:
        natural = way != "zigzag"
        attend = make_ring_attention(
            mesh, layout=layout, natural_order=natural, implementation=kernels
        )
        return lambda q, k, v: attend(q, k, v, mask)

    def local(q, k, v):
        # The gradient of a gather is a sum in the type of the keys: bfloat16.
        keys = lax.all_gather(k, "ring", axis=1, tiled=True)
        values = lax.all_gather(v, "ring", axis=1, tiled=True)
        first = lax.axis_index("ring") * q.shape[1]
        bounds = mask(first + jnp.arange(q.shape[1], dtype=jnp.int32), keys.shape[1])
        options = {"layout": layouts.Contiguous(), "implementation": kernels}
        return ring_attention(q, keys, values, *bounds, axis_name=(), **options)

    spec = P(None, "ring")
    return jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )


def rotated(x: jax.Array) -> jax.Array:
    """Applies RoPE to (1, T, H, HEAD_DIM)."""
    token = jnp.arange(x.shape[1], dtype=jnp.float32)
    angle = token[:, None] * 1e4 ** -jnp.linspace(0, 1, HEAD_DIM // 2, endpoint=False)
    sine = jnp.sin(angle)[None, :, None]
    cosine = jnp.cos(angle)[None, :, None]
    first, second = jnp.split(x, 2, -1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def loss_of(attend: Attend) -> Attend:
    """Returns the loss of LAYERS scanned layers, of x (1, T, E) and their weights."""
    names = "attention_out", "attention_lse"
    saved = jax.checkpoint_policies.save_only_these_names(*names)

    @functools.partial(jax.checkpoint, policy=saved)
    def layer(x, weights):
        size = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
        y = x * lax.rsqrt(size + 1e-6).astype(x.dtype)
        heads = 1, y.shape[1], -1, HEAD_DIM
        k = rotated((y @ weights["k"]).reshape(heads))
        v = (y @ weights["v"]).reshape(heads)
        q = rotated((y @ weights["q"]).reshape(heads))
        x = x + attend(q, k, v).reshape(1, y.shape[1], -1) @ weights["o"]
        if "up" in weights:
            gate = jax.nn.silu(x @ weights["gate"])
            x = x + (gate * (x @ weights["up"])) @ weights["down"]
        return x, None

    def loss(x, weights):
        return jnp.square(lax.scan(layer, x, weights)[0].astype(jnp.float32)).mean()

    return loss


def weights_of(
    hidden: int, heads: int, kv_heads: int, feed_forward: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the weights of LAYERS layers; feed_forward: 0 for none."""
    wide = heads * HEAD_DIM
    narrow = kv_heads * HEAD_DIM
    shapes = {"q": (hidden, wide), "k": (hidden, narrow), "v": (hidden, narrow)}
    shapes["o"] = wide, hidden
    if feed_forward:
        shapes["gate"] = shapes["up"] = hidden, feed_forward
        shapes["down"] = feed_forward, hidden
    return {
        name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.bfloat16)
        for name, shape in shapes.items()
    }


def exchanges(program: Program, ring_size: int, cycles: float) -> Counter:
    """Counts permutes between devices d and N - 1 - d: (MiB, microseconds beside them).

    cycles: in a second, of which XLA tells those of the instructions in between. With
      a kernel among them, or if nothing is told, there is no end of microseconds.
    """
    opposite = {(n, ring_size - 1 - n) for n in range(ring_size)}
    counts: Counter = Counter()
    for name, times in program.runs.items():
        operations = list(program.text[name].operations.values())
        kernels = {x.name for x in program.computations[name] if x.kind == "kernel"}
        for position, start in enumerate(operations):
            listed = re.search(r"source_target_pairs=\{\{([\d,{}]*)\}\}", start.rest)
            if listed is None:
                continue
            pairs = [pair.split(",") for pair in listed[1].split("},{")]
            if {(int(a), int(b)) for a, b in pairs} != opposite:
                continue
            beside = 0.0
            for other in operations[position + 1 :]:
                if other.opcode.endswith("-done") and start.name in other.operands:
                    break
                beside += (other.cycles or 0) / cycles * 1e6
                if other.name in kernels:
                    beside = float("inf")
            is_asynchronous = start.opcode.endswith("-start")
            moved = start.results[0].bytes / 2**20
            counts[moved, beside if is_asynchronous else 0.0] += times
    return counts


def report(text: str, ring_size: int, kind: str) -> None:
    """Prints collectives, exchanges, small instructions and copies of a program."""
    program = Program.parse(text, ring_size)
    collectives: Counter = Counter()
    for one in program.collectives():
        size = round(one.bytes_sent / 2**20, 2)
        collectives[one.kind, size, one.is_hidden] += one.times
    for (what, size, is_hidden), times in sorted(collectives.items()):
        print(f"  {times} x {what}, {size} MiB, {'' if is_hidden else 'not '}hidden")
    chip = chips.find(kind)
    if chip and chip.matrix_units:
        exposed = 0.0
        counts = exchanges(program, ring_size, cycles_per_second(chip))
        for (moved, beside), times in sorted(counts.items()):
            needs = moved * 2**20 / chip.interconnect_bytes_per_second * 1e6
            exposed += times * max(0.0, needs - beside)
            print(
                f"  exchange: {times} x {moved:.1f} MiB, {needs:.0f} us, {beside:.0f}"
            )
        print(f"  exposed {exposed / LAYERS:.0f} us a layer")
    cycles = 0
    copies = 0
    for name, times in program.runs.items():
        for operation in program.text[name].operations.values():
            cycles += times * (operation.cycles or 0)
            copies += times * (operation.opcode in ("copy", "copy-start"))
    small = small_instructions(text, ring_size)
    print(f"  {small:.1f} small instructions a ring step, {copies / LAYERS:.0f} copies")
    print(f"  and {cycles / LAYERS:,.0f} cycles a layer; orders {program.orders()}")


def main() -> None:
    """Compiles each way for some devices of a chip, and prints what it waits for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("chip")
    parser.add_argument("devices", type=int)
    parser.add_argument("--tokens", type=int, default=2048, help="of a device")
    sizes = [4096, 32, 8, 11264]
    parser.add_argument("--sizes", type=int, nargs=4, default=sizes)
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["zigzag", "mirror"])
    options = parser.parse_args()
    is_gpu = options.chip in GPUS
    find = gpu_devices if is_gpu else tpu_devices
    devices = np.array(find(options.chip, options.devices)[: options.devices])
    mesh = Mesh(ring_along(devices, 0), ("ring",))
    kind = devices[0].device_kind
    mask = masks.window(options.window) if options.window else masks.causal()
    shape = 1, options.devices * options.tokens, options.sizes[0]
    sharding = NamedSharding(mesh, P(None, "ring"))
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    for way in options.ways:
        attend = attention_of(way, mesh, "hopper" if is_gpu else "pallas_tpu", mask)
        step = jax.jit(
            jax.value_and_grad(loss_of(attend), (0, 1)),
            compiler_options=compiler_options(kind),
        )
        weights = weights_of(*options.sizes)
        compiled = compile_without_bodies(mesh, step, x, weights)
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        assert memory is not None and text is not None
        size = memory.temp_size_in_bytes / 2**30
        print(f"{way}, window {options.window}: temporaries {size:.2f} GiB", flush=True)
        report(text, options.devices, kind)


if __name__ == "__main__":
    main()
