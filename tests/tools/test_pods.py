"""Pods that are not attached: their names, shapes, links and compiler."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels.ring.torus import wraps
from tests.cases import pairs
from tools.lib.compiled.pods import PODS, aot_pod, compile_for, device_kind, tpu_devices


def shape(topology: str) -> tuple[int, ...]:
    return tuple(map(int, topology.split(":")[-1].split("x")))


@pytest.mark.parametrize(("asked", "found"), pairs("topologies.txt", "grow"))
def test_smallest_topology_that_is_large_enough(asked, found):
    chip, devices = asked.split()
    assert PODS[chip].grow(int(devices)) == shape(found)


@pytest.mark.parametrize(("topology", "closed"), pairs("topologies.txt", "closed"))
def test_axes_are_closed_where_the_pods_are(topology, closed):
    found = wraps(device_kind(topology.split(":")[0]), shape(topology))
    assert "".join("-o"[is_closed] for is_closed in found) == closed


@pytest.mark.parametrize(("name", "found"), pairs("topologies.txt", "pod"))
def test_pods_have_the_names_of_clouds_and_the_link_between_hosts(name, found):
    topology, devices, rate, cores, kind = found.split(" ", 4)
    pod = aot_pod(name)
    assert (pod.topology, len(pod.devices)) == (topology, int(devices))
    assert {device.device_kind for device in pod.devices} == {kind}
    assert pod.chip.interconnect_bytes_per_second == float(rate)
    if cores != "-":
        assert {device.num_cores for device in pod.devices} == {int(cores)}


@pytest.mark.parametrize(("asked", "said"), pairs("topologies.txt", "bad"))
def test_what_cannot_be_described_is_refused(asked, said):
    topology, *devices = asked.split()
    with pytest.raises(ValueError, match=re.escape(said)):
        tpu_devices(topology, *map(int, devices))


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
