"""Compiles attention on a few tiles for an AOT topology: ours, or splash attention.

`tpu_schedule.py` runs this as a program, once for every kernel, as the compiler's dump
flags hold for a whole process:

    python -m tools.lib.tpu_compiler.tile_program '{"tile": {...}, ...}'

compiles the request of `write_request`, and prints `Compiled` as JSON.
"""

import dataclasses
import importlib
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kernels.block_sizes import BlockSizes
from kernels.tpu import launch
from kernels.tpu.block_sizes import TpuBlocks
from training.pods import compile_for, tpu_devices

SPLASHES = {
    "splash": "jax.experimental.pallas.ops.tpu.splash_attention",
    "tokamax": "tokamax._src.ops.experimental.tpu.splash_attention",
}
"""Packages of splash attention: JAX's and tokamax's."""


@dataclass(frozen=True)
class Tile:
    """A tile to compile, and the problem around it.

    chip: of `pods.PODS`.
    direction: "forward" or "backward".
    block_q, block_k: query rows and key slots of the tile, of which `TpuBlocks` and
      `Splash` have their own.
    group: query heads of a key/value head. Ours stacks their rows in a tile.
    length: tokens, queries and keys alike.
    has_carry: whether our forward kernel goes on from a partial result.
    soft_cap: of the scores, if any, of splash too.
    kv_heads: one for each core of a megacore, or more.
    """

    chip: str
    direction: str
    block_q: int
    block_k: int
    head_dim: int
    dtype: str
    group: int
    length: int
    has_carry: bool = False
    soft_cap: float | None = None
    kv_heads: int = 2

    def __post_init__(self):
        if self.length % self.block_q or self.length % self.block_k:
            raise ValueError(f"{self.length=} is not a multiple of the blocks: {self}")
        if self.block_q % self.group:
            raise ValueError(f"{self.block_q=} is not a multiple of {self.group=}")


@dataclass(frozen=True)
class Splash:
    """Options of splash attention.

    mask: "full", or "causal", which JAX's computes and applies in every tile.
    is_fused: whether one backward kernel makes dq, dk and dv; tokamax has no other.
    block_q, block_k: its own tile.
    compute_k: keys of the tile that are worked on at a time.
    kernel: of `SPLASHES`.
    has_lp_scheduler: whether the compiler is asked for its scheduler by linear
      programming (tokamax, forward).
    max_logit: constant that takes the place of the row maxima (tokamax).
    """

    mask: str
    is_fused: bool
    block_q: int
    block_k: int
    compute_k: int
    kernel: str = "splash"
    has_lp_scheduler: bool = False
    max_logit: float | None = None

    @property
    def name(self) -> str:
        """What it is, less its tile."""
        parts = [f"{self.kernel} {self.mask}"]
        parts += ["fused"] if self.is_fused else []
        parts += ["LP"] if self.has_lp_scheduler else []
        parts += ["no maximum"] if self.max_logit is not None else []
        return ", ".join(parts)


Variant = Splash | TpuBlocks | None
"""Splash attention, or our kernel with these blocks, or (None) with the table's."""


@dataclass(frozen=True)
class Program:
    """A function, the shapes of its arguments and the kernels in it that count."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """Result of a compilation; vmem_bytes: by kernel, spills included."""

    device_kind: str
    libtpu: str
    vmem_bytes: dict[str, int]


def our_program(tile: Tile, blocks: TpuBlocks | None) -> Program:
    """Builds the program of `kernels.tpu.launch`."""
    tokens, heads = tile.length, tile.group * tile.kv_heads
    q = jax.ShapeDtypeStruct((1, tokens, heads, tile.head_dim), tile.dtype)
    k = jax.ShapeDtypeStruct((1, tokens, tile.kv_heads, tile.head_dim), tile.dtype)
    bound = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    row = jax.ShapeDtypeStruct((1, heads, tokens), jnp.float32)
    dq = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    sizes = BlockSizes(tile.block_q // tile.group, tile.block_k)
    options = {
        "scale": tile.head_dim**-0.5,
        "soft_cap": tile.soft_cap,
        "block_sizes": None if blocks else sizes,
        "launch": launch.Launch(blocks=blocks),
    }
    if tile.direction == "forward":
        return Program(
            lambda *operands: launch.forward(
                *operands[:5], **options, carry=operands[5:] or None
            ),
            (q, k, k, bound, bound, *([dq, row] if tile.has_carry else [])),
            ("flash_forward",),
        )
    dk = jax.ShapeDtypeStruct(k.shape, jnp.float32)  # so far, as is dv
    return Program(
        lambda *operands: launch.backward(
            *operands[:8], **options, dq=operands[8], dkv=operands[9:]
        ),
        (q, k, k, q, row, row, bound, bound, dq, dk, dk),
        ("flash_backward",),
    )


def splash_program(tile: Tile, splash: Splash) -> Program:
    """Builds that of splash attention; backward, the forward kernel is in it too."""
    tokens, heads = tile.length, tile.group * tile.kv_heads
    kernel, masks = (
        importlib.import_module(f"{SPLASHES[splash.kernel]}.splash_attention_{name}")
        for name in ("kernel", "mask")
    )
    shape = q, k, compute = splash.block_q, splash.block_k, splash.compute_k
    # Backward, the forward kernel is not counted, and has to fit.
    limit = 1024 if tile.direction == "backward" else tokens
    names = "block_q", "block_kv", "block_kv_compute"
    sizes = {name: min(size, limit) for name, size in zip(names, shape, strict=True)}
    sizes |= {"block_q_dkv": q, "block_kv_dkv": k, "block_kv_dkv_compute": compute}
    if not splash.is_fused:
        sizes |= {"block_q_dq": q, "block_kv_dq": k}
    mask = {"causal": masks.CausalMask, "full": masks.FullMask}[splash.mask]
    mask, cap = mask((tokens, tokens)), {"attn_logits_soft_cap": tile.soft_cap}
    if splash.kernel == "splash":
        attend = kernel.make_splash_mha(
            masks.MultiHeadMask([mask] * heads),
            block_sizes=kernel.BlockSizes(
                **sizes, use_fused_bwd_kernel=splash.is_fused
            ),
            head_shards=1,
            q_seq_shards=1,
            **cap,
        )
    else:
        config = kernel.SplashConfig(
            **sizes,
            **cap,
            use_experimental_scheduler=splash.has_lp_scheduler,
            max_logit_const=splash.max_logit,
        )
        attend = kernel.make_splash_mha(mask, config=config, q_seq_shards=1)
    q = jax.ShapeDtypeStruct((heads, tokens, tile.head_dim), tile.dtype)
    k = jax.ShapeDtypeStruct((tile.kv_heads, tokens, tile.head_dim), tile.dtype)
    if tile.direction == "forward":
        return Program(attend, (q, k, k), ("splash_mha_fwd_no_residuals",))
    kernels = ("splash_mha_dkv_no_residuals", "splash_mha_dq_no_residuals")
    return Program(
        lambda q, k, v, do: jax.vjp(attend, q, k, v)[1](do),
        (q, k, k, q),
        kernels[:1] if splash.is_fused else kernels,
    )


def make_program(tile: Tile, variant: Variant) -> Program:
    """Builds the program of splash attention, or of our kernel."""
    if isinstance(variant, Splash):
        return splash_program(tile, variant)
    return our_program(tile, variant)


def write_request(tile: Tile, variant: Variant) -> str:
    """Returns the argument that this program must be called with."""
    request = {
        "tile": tile,
        "splash": variant if isinstance(variant, Splash) else None,
        "blocks": variant if isinstance(variant, TpuBlocks) else None,
    }
    return json.dumps(request, default=dataclasses.asdict)


def read_request(text: str) -> tuple[Tile, Variant]:
    """Undoes `write_request`."""
    request = json.loads(text)
    kinds = {"splash": Splash, "blocks": TpuBlocks}
    variants = [kind(**request[name]) for name, kind in kinds.items() if request[name]]
    return Tile(**request["tile"]), variants[0] if variants else None


def read_vmem(program_text: str, kernel: str) -> int:
    """Returns the VMEM bytes of a kernel, from the text of the compiled program.

    Raises:
      ValueError: there is no such kernel, or more than one.
    """
    found = re.findall(
        rf'%{kernel}[.\d]* = .*?"used_scoped_memory_configs":(\[.*?\])',
        program_text,
        re.DOTALL,
    )
    if len(found) != 1:
        raise ValueError(f"{len(found)} kernels {kernel!r} were compiled, instead of 1")
    # Memory space 1 is VMEM.
    return sum(
        int(memory["size"])
        for memory in json.loads(found[0])
        if memory["memory_space"] == "1"
    )


def main(request: str) -> None:
    """Compiles what a request asks for, and prints the result."""
    tile, variant = read_request(request)
    program = make_program(tile, variant)
    device = tpu_devices(tile.chip)[0]
    mesh = Mesh(np.array([device]), ("device",))
    text = compile_for(mesh, program.function, *program.arguments).as_text()
    compiled = Compiled(
        device.device_kind,
        importlib.metadata.version("libtpu"),
        {kernel: read_vmem(text, kernel) for kernel in program.kernels},
    )
    print(json.dumps(dataclasses.asdict(compiled)))


if __name__ == "__main__":
    main(sys.argv[1])
