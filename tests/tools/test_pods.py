import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.ring.torus import wraps
from tools.lib.compiled.pods import PODS, aot_pod, compile_for, device_kind, tpu_devices


@pytest.mark.parametrize(
    ("chip", "devices", "shape"),
    [
        ("v3", 512, (16, 16)),
        ("v4", 1, (2, 2, 1)),
        ("v4", 513, (8, 8, 16)),
        ("v5p", 32, (2, 4, 4)),
        ("v5e", 5, (2, 4)),
    ],
)
def test_smallest_topology_that_is_large_enough(chip, devices, shape):
    assert PODS[chip].grow(devices) == shape


@pytest.mark.parametrize(
    ("chip", "shape", "closed"),
    [
        ("v3", (16, 16), (False, False, False)),
        ("v4", (4, 4, 2), (False, False, False)),
        ("v4", (4, 4, 8), (True, True, True)),
        ("v5e", (8, 16), (False, True, False)),
        ("v6e", (16, 16), (True, True, False)),
    ],
)
def test_axes_are_closed_where_the_pods_are(chip, shape, closed):
    assert wraps(device_kind(chip), shape) == closed


@pytest.mark.parametrize(
    ("topology", "count", "kind", "cores"),
    [
        ("v3", 8, "TPU v3", 1),
        ("v5e", 4, "TPU v5 lite", 1),
        ("v4:8x8x16", 1024, "TPU v4", 2),
    ],
)
def test_described_devices_are_of_the_chip(topology, count, kind, cores):
    found = tpu_devices(topology)
    kinds = {(d.platform, d.device_kind, d.num_cores) for d in found}
    assert (len(found), kinds) == (count, {("tpu", kind, cores)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v9:2x2",), "chip 'v9' .* must be one of v3, v4, v5e, v5p"),
        (("v5e", 257), "257 devices, but the pod has 256"),
        (("v4:2x2x1", 8), "v4:2x2x1 has 4 devices, fewer than"),
        (("v5e:3x3",), "libtpu refuses v5e:3x3"),
    ],
)
def test_what_cannot_be_described_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tpu_devices(*arguments)


@pytest.mark.parametrize(
    ("name", "topology", "devices", "kind", "rate"),
    [
        ("v5litepod-64", "v5e:8x8", 64, "TPU v5 lite", 50e9),
        ("v5p-128", "v5p:4x4x4", 64, "TPU v5", 100e9),
        ("v4-1024", "v4:8x8x8", 512, "TPU v4", 45e9),
        ("v3-32", "v3:4x4", 32, "TPU v3", 100e9),
        ("h200:1x1x8", "h200:1x1x8", 8, "NVIDIA H200", 450e9),
        ("h100:1x4", "h100:1x4", 4, "NVIDIA H100 80GB HBM3", 450e9),
        ("h200:4x8", "h200:4x8", 32, "NVIDIA H200", 50e9),
    ],
)
def test_pods_have_the_names_of_clouds_and_the_link_between_hosts(
    name, topology, devices, kind, rate
):
    pod = aot_pod(name)
    assert (pod.topology, len(pod.devices)) == (topology, devices)
    assert {device.device_kind for device in pod.devices} == {kind}
    assert pod.chip.interconnect_bytes_per_second == rate


NO_TOPOLOGY = "h200:1x9 h200:1x1x16 h100:2x2x8 v5p-99999 v5p b200 v5e:16x32 v5e:2x2x2"
NO_TOPOLOGY += " v4:16x16x32 v4:2x2 v5e:02x2"


@pytest.mark.parametrize("name", NO_TOPOLOGY.split())
def test_what_is_no_topology_is_refused_with_those_that_are(name):
    with pytest.raises(ValueError, match="must be a topology: known are "):
        aot_pod(name)


def test_missing_compiler_is_named_with_its_requirements(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ModuleNotFoundError, match=r"libtpu.*requirements-dev\.txt"):
        tpu_devices("v5e")


@pytest.mark.quick
def test_function_is_compiled_for_all_devices_of_the_mesh():
    mesh = Mesh(np.array(tpu_devices("v5e")), ("ring",))
    rows = NamedSharding(mesh, PartitionSpec("ring"))
    x = jax.ShapeDtypeStruct((4, 128), jnp.float32, sharding=rows)
    weight = jax.ShapeDtypeStruct((128,), jnp.float32)  # replicated

    def total(parts):
        return (parts["x"] * parts["weight"]).sum()

    for function in (total, jax.jit(total, donate_argnums=0)):
        compiled = compile_for(mesh, function, {"x": x, "weight": weight})
        assert "all-reduce" in compiled.as_text()
        # One device holds one row and the weight, each in a tile of 1 x 128.
        assert compiled.memory_analysis().argument_size_in_bytes == 2 * 128 * 4
