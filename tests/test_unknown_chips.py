"""What runs on a chip, known or not, and what it is taken for: a table of the docs."""

import importlib.util
import re
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels import backends
from kernels.backends import tokamax_gpu
from kernels.cost.choice import known_chip
from tests.support.processes import ROOT
from training.reports.metrics import Throughput

_PAGE = (ROOT / "docs/use_the_ring.md").read_text()
ROWS = re.findall(
    r"^\| `([^`]+)`.* \| (`.*`) \| (yes|no) \| (\S.*) \|$",
    _PAGE.partition("### Chips that no table has")[2],
    re.MULTILINE,
)


def chosen(kind: str) -> str:
    """Returns the name of the kernels that a device of this kind runs."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="any")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        best = backends.choose(None, jnp.dtype(jnp.bfloat16), 128)
    return next(name for name, it in backends.IMPLEMENTATIONS.items() if it is best)


def test_the_table_has_unknown_chips_of_every_maker():
    assert len(ROWS) == 14


@pytest.mark.parametrize("kind, kernels, mfu, assumed", ROWS)
def test_a_chip_runs_what_it_can_and_what_is_assumed_is_said(
    kind, kernels, mfu, assumed, monkeypatch, caplog
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    names = []
    for version in tokamax_gpu.TESTED, None:
        backends._best.cache_clear()
        monkeypatch.setattr(tokamax_gpu, "installed_version", lambda v=version: v)
        names.append(f"`{chosen(kind)}`")
    assert kernels == ", or else ".join(dict.fromkeys(names))
    backends._best.cache_clear()
    is_known = Throughput.of([SimpleNamespace(device_kind=kind)]).peak_flops is not None
    assert is_known == (mfu == "yes")
    caplog.clear()
    known_chip.cache_clear()
    assert known_chip(kind).name == assumed
    is_silent = is_known or kind == "cpu"
    assert len(caplog.messages) == (not is_silent)
    for message in caplog.messages:
        words = (
            f"{kind} is not in the table of chips: no MFU is reported, .* as for the "
        )
        assert re.match(words + assumed, message)


def test_a_mesh_without_devices_is_no_unknown_chip(caplog):
    """On which a plan checks its config, before it has those of a topology."""
    known_chip.cache_clear()
    known_chip("")
    assert not caplog.messages
