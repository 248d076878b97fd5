"""Suggested meshes, and the estimate's parts, without compiling anything."""

import dataclasses
import json

import numpy as np
import pytest

from kernels.block_sizes import BlockSizes
from kernels.layouts import Contiguous, Striped, Zigzag
from kernels.masks import causal
from models.flops import num_parameters
from models.llama import LlamaConfig
from tools import plan_pod
from tools.lib.benchmarks.work import critical_path, tiles_per_step
from tools.lib.planning.estimate import Exposed, Kernels, Ring, estimate, mean_area
from tools.lib.planning.estimate import products_flops as flops_of_products
from tools.lib.planning.memory import saved_bytes
from tools.lib.planning.meshes import suggestions
from tools.plan_pod import read_config
from training import chips
from training.mesh import MESH_AXES, MeshShape, Partition

# From ml_collections, whenever it reads a config's file.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

V4, V5E, V3, H200 = map(chips.find, ("TPU v4", "TPU v5 lite", "TPU v3", "NVIDIA H200"))


def config_7b(**overrides):
    fields = {"data.context_tokens": 2**23, "remat": "nothing", "attention_parts": 1}
    fields |= {name.replace("__", "."): value for name, value in overrides.items()}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    return read_config(["--config=configs/tpuv4_7b.py", *arguments])


def partition(data=1, fsdp=1, ring=512, tensor=1):
    return Partition(MeshShape(data, fsdp, ring, tensor).abstract_mesh())


@pytest.mark.parametrize("layout", [Contiguous(), Striped(), Zigzag()], ids=str)
@pytest.mark.parametrize("ring_size", [1, 2, 4, 8])
def test_area_is_that_of_the_counted_tiles(layout, ring_size):
    length = 1024
    visible = causal()(np.arange(ring_size * length)[None], ring_size * length)
    work = tiles_per_step(layout, ring_size, visible, BlockSizes(256, 256))
    expected = critical_path(work) * 256**2 / ring_size
    assert mean_area(layout, ring_size, length) == pytest.approx(expected)


def test_kernels_are_as_fast_as_their_schedules_and_no_faster_than_the_peak():
    fast = Kernels.of(V5E)
    # 3888 bundles at 1.5 GHz would beat the peak: 2 products of 1024 x 1024 x 128.
    assert fast.seconds["forward"] == pytest.approx(4 * 128 / 197e12)
    slower = Kernels.of(V4)
    assert slower.seconds["forward"] == pytest.approx(
        4144 / 4096 * 4 * 128 / 275e12, rel=0.03
    )
    assert "4144" in slower.source


@pytest.mark.parametrize("chip", [V3, H200])
def test_kernels_without_schedules_take_an_assumed_share(chip):
    kernels = Kernels.of(chip)
    assert kernels.seconds["forward"] == 2 * 2 * 128 / (0.6 * chip.peak_flops)
    assert "assumed" in kernels.source


def test_ring_hides_where_a_device_has_tokens_enough():
    kernels = Kernels.of(V4)
    long = Ring.of(config_7b(), partition(), V4)
    assert long.is_covered(V4, kernels)
    assert long.keys_bytes == 2 * 16384 * 4096 * 2
    short = Ring.of(config_7b(data__context_tokens=2**21), partition(), V4)
    assert not short.is_covered(V4, kernels)
    ratio = long.kernel_seconds(kernels, "forward") / short.kernel_seconds(
        kernels, "forward"
    )
    assert ratio == pytest.approx(16, rel=0.1)


@pytest.mark.parametrize(
    ("chip", "head_dim", "sent"), [(V4, 128, 128), (V4, 100, 128), (H200, 100, 100)]
)
def test_heads_travel_between_tpus_in_whole_lanes(chip, head_dim, sent):
    ring = Ring.of(config_7b(model__head_dim=head_dim), partition(), chip)
    assert ring.keys_bytes == 2 * 16384 * 32 * sent * 2
    assert ring.gradients_bytes == 2 * ring.keys_bytes


def test_products_are_computed_again_as_remat_says():
    config = config_7b(remat="products")
    sizes = LlamaConfig(**config.model)
    tokens, whole = 16384, partition()
    matrices = num_parameters(sizes) - 32_000 * 4096 - 65 * 4096
    head, feed_forward = 32_000 * 4096, 32 * 3 * 4096 * 11008
    kept = 2.0 * tokens * (3 * matrices + feed_forward + head)  # in chunks
    assert flops_of_products(config, whole) == pytest.approx(kept)
    again = 2.0 * tokens * 4 * matrices
    assert flops_of_products(config_7b(remat="attention"), whole) == again
    config = config_7b(remat="nothing")
    twice = again + 2.0 * tokens * 32 * 3 * 4096**2  # queries, keys and values
    assert flops_of_products(config, whole) == twice
    assert flops_of_products(config, partition(ring=256, tensor=2)) == twice


@pytest.mark.parametrize(
    ("remat", "bytes_a_token"),
    [
        ("nothing", 2 * 4096),
        ("offload", 2 * 4096),
        ("attention", 2 * (4096 + 4096) + 4 * 32),
        ("products", 2 * (6 * 4096) + 4 * 32),
    ],
)
def test_saved_by_layers_follows_the_policy(remat, bytes_a_token):
    config = config_7b(remat=remat)
    assert saved_bytes(config, partition()) == 32 * 16384 * bytes_a_token


def test_estimate_adds_up_and_waits_for_what_is_exposed():
    config = config_7b()
    hidden = estimate(config, partition(), V4, 1e18, Exposed(0, 0, 0))
    assert hidden.exposed == 0
    assert hidden.step == hidden.products + hidden.attention
    assert hidden.mfu == pytest.approx(1e18 / (hidden.step * 512 * 275e12))
    exposed = estimate(config, partition(), V4, 1e18, Exposed(45e9, 1, 180e9))
    assert exposed.step - hidden.step == pytest.approx(1 + 2)


def test_best_mesh_hides_its_ring_and_waits_the_least():
    found = suggestions(config_7b(), 512, V4)
    best = found[0]
    assert best.mesh == {"data": 1, "fsdp": 1, "ring": 512, "tensor": 1}
    assert best.fits and best.hiding > 1
    waits = [one.exposed_bytes for one in found if one.fits and one.hiding >= 1]
    assert waits == sorted(waits)
    # One row, and 32 heads: nothing else divides.
    assert all(one.mesh["data"] == one.mesh["fsdp"] == 1 for one in found)
    assert max(one.mesh["tensor"] for one in found) == 32


def test_ring_that_does_not_hide_ranks_below_one_that_does():
    found = suggestions(config_7b(data__context_tokens=2**22), 512, V4)
    assert found[0].mesh["ring"] == 256
    hidden = [one.hiding >= 1 for one in found if one.fits]
    assert hidden == sorted(hidden, reverse=True)


def test_mesh_that_should_not_fit_comes_last():
    found = suggestions(config_7b(data__context_tokens=2**22), 512, V4)
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    assert not all(fits)


def test_where_no_mesh_divides_the_reason_is_told():
    with pytest.raises(ValueError, match="a multiple of 512, the next is"):
        suggestions(config_7b(data__context_tokens=2**22 + 1), 512, V4)


def test_suggestions_are_printed_and_written(tmp_path, capsys):
    output = tmp_path / "meshes.json"
    arguments = ["--config=configs/h200_1b.py", "--topology=h200:1x1x8", "--suggest"]
    plan_pod.main([*arguments, "--config.data.batch_rows=8", f"--output={output}"])
    rows = json.loads(output.read_text())
    printed = capsys.readouterr().out.splitlines()
    first = [int(size) for size in printed[1].split()[:4]]
    assert first == [rows[0]["mesh"][axis] for axis in MESH_AXES]
    assert {np.prod(list(row["mesh"].values())) for row in rows} == {8}
    found = suggestions(
        read_config([*arguments[:1], "--config.data.batch_rows=8"]), 8, H200
    )
    assert rows == [dataclasses.asdict(one) for one in found]
