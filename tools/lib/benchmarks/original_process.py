"""Runs haoliuhl's `ringattention` once for each line of input, in its own Python.

Started by `tools.bench_ring --beside`, with an older JAX than this repository, of which
it therefore imports nothing. Its arguments are a directory, the devices of the ring,
and the rows and keys of a chunk. `problem.npz` in the directory has q, k, v and d_out,
float32 (B, T, H, D), and, where rows hold several documents, `segments`, int32 (B, T),
a number for each. It prints one line of JSON, with `compile_seconds` and `versions`.
Then it runs once for each line that it reads, and prints `wall` and `cpu`, in seconds.
At the end of its input it writes out, dq, dk and dv to `answer.npz`.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np


def _compiled(
    directory: Path, devices: str, chunk: str
) -> tuple[Callable, list, float]:
    """Returns the program, its operands, and the seconds that compiling it took.

    Imports JAX after setting the number of its devices.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"

    import jax
    import jax.numpy as jnp
    from jax.experimental.shard_map import shard_map
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from ringattention import ringattention_jax

    options = {
        "causal_block_size": 1,
        "deterministic": True,
        "dropout_rng": None,
        "attn_pdrop": 0.0,
        "query_chunk_size": int(chunk),
        "key_chunk_size": int(chunk),
        "dtype": jnp.float32,
        "policy": jax.checkpoint_policies.nothing_saveable,
        "precision": None,
        "prevent_cse": False,
    }
    mesh = Mesh(np.array(jax.devices()), ("ring",))
    tokens_second = PartitionSpec(None, "ring")
    with np.load(directory / "problem.npz") as problem:
        segments = problem["segments"] if "segments" in problem else None
        operands = [
            jax.device_put(problem[name], NamedSharding(mesh, tokens_second))
            for name in ("q", "k", "v", "d_out")
        ]

    given = None, segments, None, "ring", True, options

    def both(q, k, v, d_out):
        out, pull = jax.vjp(lambda *qkv: ringattention_jax(*qkv, *given), q, k, v)
        return out, *pull(d_out)

    specs = {"in_specs": (tokens_second,) * 4, "out_specs": (tokens_second,) * 4}
    program = shard_map(both, mesh=mesh, **specs, check_rep=False)
    begin = time.perf_counter()
    run = jax.jit(program).lower(*operands).compile()
    return run, operands, time.perf_counter() - begin


def main() -> None:
    """Runs the program."""
    folder, devices, chunk = sys.argv[1:]
    directory = Path(folder)
    run, operands, seconds = _compiled(directory, devices, chunk)
    versions = {name: version(name) for name in ("ringattention", "jax", "jaxlib")}
    print(json.dumps({"compile_seconds": seconds, "versions": versions}), flush=True)

    for _ in sys.stdin:
        wall = time.perf_counter()
        cpu = time.process_time()
        for result in run(*operands):
            result.block_until_ready()
        wall = time.perf_counter() - wall
        cpu = time.process_time() - cpu
        print(json.dumps({"wall": wall, "cpu": cpu}), flush=True)
    out, dq, dk, dv = map(np.asarray, run(*operands))
    np.savez(directory / "answer.npz", out=out, dq=dq, dk=dk, dv=dv)


if __name__ == "__main__":
    main()
