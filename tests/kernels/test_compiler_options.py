"""Which of XLA's options a mesh gets; what they change is in the tests of compilers."""

from types import SimpleNamespace

import numpy as np
import pytest

from configs import base
from kernels.devices import compiler
from kernels.devices.compiler import compiler_options
from tasks.text import TextRun
from tests.small.models import partition_of
from training.sharding.mesh import MeshShape

PEER = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}


def mesh_of(kind: str, processes: int):
    """Stands in for a mesh of two devices a process."""
    devices = [
        SimpleNamespace(device_kind=kind, process_index=process)
        for process in range(processes)
        for _ in range(2)
    ]
    return SimpleNamespace(devices=np.array(devices).reshape(2, -1))


@pytest.mark.parametrize(
    "kind, processes, is_heard",
    [("NVIDIA H200", 1, True), ("NVIDIA H200", 2, False), ("TPU v5e", 1, False)],
)
def test_peer_transfers_are_for_the_gpus_of_one_process(
    kind, processes, is_heard, caplog
):
    compiler._say_ignored.cache_clear()
    mesh = mesh_of(kind, processes)
    default = compiler_options(mesh)
    options = [compiler_options(mesh, "peer") for _ in range(2)]
    assert options == [default | PEER if is_heard else default] * 2
    assert len(caplog.messages) == (not is_heard)
    for line in caplog.messages:
        assert line.startswith("gpu_transfers='peer' is for NVIDIA GPUs of one process")
        assert f"this is {kind} in {processes}" in line
    assert compiler_options("NVIDIA H200", "peer").items() >= PEER.items()


@pytest.mark.parametrize("kind", ["NVIDIA H200", "TPU v5e", "TPU v3", "cpu"])
def test_by_default_a_kind_has_the_options_of_its_mesh(kind, caplog):
    options = compiler_options(mesh_of(kind, 1))
    assert options and options == compiler_options(kind) == compiler_options(
        kind, "nccl"
    )
    assert not {*PEER} & {*options} and not caplog.messages


def test_a_run_asks_for_its_configs_transfers(caplog):
    compiler._say_ignored.cache_clear()
    config = base.changed(gpu_transfers="symmetric")
    options = TextRun(config, partition_of(MeshShape())).compiler_options
    assert options == compiler_options("cpu")
    (line,) = caplog.messages
    assert line.startswith("gpu_transfers='symmetric' is for NVIDIA GPUs")


def test_unknown_transfers_are_refused():
    with pytest.raises(ValueError, match="one of nccl, peer, symmetric, got 'fast'"):
        compiler_options("NVIDIA H200", "fast")
