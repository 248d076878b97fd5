"""The folder kernels/ as the package `annulus`, and what importing the tree takes."""

import importlib
import re
import tomllib

import pytest

import kernels
from kernels import backends
from tests.support.processes import ROOT, run_program

# The striped ring of 4 simulated devices, on a mesh as `jax.make_mesh` makes it (with
# explicit shardings), against attention on one device.
RING = """
import sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 4)
from annulus import make_ring_attention, ring_attention
assert callable(ring_attention)  # which the file that it is in would hide
from annulus import *
import annulus
annulus.make_ring_attention
assert callable(ring_attention) and callable(annulus.ring_attention)
from annulus import Striped, attention, compiler_options, documents
from annulus import make_ring_attention, permute, unpermute

mesh, layout = jax.make_mesh((4,), ("ring",)), Striped()
attend = make_ring_attention(mesh, layout=layout)
rng = np.random.default_rng(11)
q = rng.normal(size=(1, 64, 4, 16)).astype(np.float32)
k, v = (rng.normal(size=(1, 64, 2, 16)).astype(np.float32) for _ in range(2))
ids = np.sort(rng.integers(0, 5, (1, 64)))  # the document of each token
ring = lambda *qkv: attend(*qkv, documents(ids))
one = lambda *qkv: attention(*qkv, visible=documents(ids))
striped = [permute(x, layout, 4) for x in (q, k, v)]
options = compiler_options(mesh)
out = unpermute(jax.jit(ring, compiler_options=options)(*striped), layout, 4)
np.testing.assert_allclose(out, one(q, k, v), atol=1e-5)
assert not {"kernels", "flax", "optax", "tests"} & set(sys.modules)

def gradient(attend):
    return jax.jit(jax.grad(lambda *qkv: (attend(*qkv) ** 2).sum(), (0, 1, 2)))


with jax.set_mesh(mesh):
    on_ring = [unpermute(x, layout, 4) for x in gradient(ring)(*striped)]
for given, expected in zip(on_ring, gradient(one)(q, k, v), strict=True):
    np.testing.assert_allclose(given, expected, atol=1e-5)
"""


# Where Pallas is missing, rings run, and kernels say with which jax they do.
WITHOUT_PALLAS = """
import sys
sys.modules["jax.experimental.pallas"] = None
import numpy as np
from annulus import attention, backends
x = np.ones((1, 8, 2, 4), np.float32)
assert (attention(x, x, x) == 1).all()
try:
    attention(x, x, x, implementation="pallas_tpu")
except NotImplementedError as refusal:
    assert f"install jax {backends.TESTED_JAX}, or" in str(refusal)
else:
    sys.exit("imported")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("program", [WITHOUT_PALLAS, RING], ids=["without", "ring"])
def test_a_program_outside_runs_the_ring(tmp_path, program):
    """Where neither the root nor its folders can be imported."""
    (tmp_path / "annulus").symlink_to(ROOT / "kernels")
    place = {"cwd": tmp_path, "PYTHONPATH": str(tmp_path)}
    assert run_program("-c", program, **place) == (0, "", "")


def test_the_range_is_that_of_the_metadata_and_its_files_are_there():
    script = (ROOT / "tools/test_range.sh").read_text()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, jax = (settings["requires-python"], settings["dependencies"][0])
    assert python == ">=3.11" and "python3.11 jax==0.10.2 python3.13 jax" in script
    assert jax.startswith("jax>=0.10.2,<")
    (files,) = re.findall(r"FILES=\(([^)]*)\)", script)
    found = {path.stem for path in (ROOT / "tests/kernels").glob("test_*.py")}
    assert {f"test_{name}" for name in files.split()} <= found
    programs = re.findall(r'^program (\S+) "(.+?)" ', script, re.MULTILINE)
    assert len(programs) == 2
    for page, heading in programs:
        _, _, below = (ROOT / page).read_text().partition(f"\n## {heading}\n")
        assert "```python" in below.partition("\n## ")[0], (page, heading)


def test_every_folder_of_the_package_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {p.parent for p in (ROOT / "kernels").rglob("*.py")}
    names = {
        ".".join(["annulus", *p.relative_to(ROOT / "kernels").parts]) for p in folders
    }
    assert set(settings["tool"]["setuptools"]["packages"]) == names


def test_kernels_are_tested_with_the_jax_of_the_requirements():
    pinned = (ROOT / "requirements.txt").read_text().splitlines()
    assert f"jax=={backends.TESTED_JAX}" in pinned


def test_every_public_name_is_there_and_documented():
    for name in ("attention", "ring_attention"):  # files of the same names
        importlib.import_module(f"kernels.{name}")
    for name in kernels.__all__:
        value = getattr(kernels, name)
        assert callable(value) and value.__doc__, name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = kernels.nothing


# What the library must not import by being imported.
NEEDLESS = {"dm_control", "matplotlib", "mujoco", "tensorflow", "torch", "transformers"}
NEEDLESS |= {"jax_triton", "pandas", "pyarrow", "pytest", "scipy.stats", "triton"}

IMPORTS = """
import importlib, pkgutil, sys, time
import grain, ml_collections.config_flags, optax, orbax.checkpoint
import tensorboard.summary.writer.event_file_writer, tqdm
from flax import nnx
from jax.experimental import pallas
from jax.experimental.pallas import mosaic_gpu, tpu

def take(names):
    # It is imported when a kernel of it is wanted, as it imports triton.
    for name in set(names) - {"kernels.backends.triton_gpu.kernels"}:
        module = importlib.import_module(name)
        folder = getattr(module, "__path__", ())
        take(f"{name}.{found.name}" for found in pkgutil.iter_modules(folder))

before, libraries = {*sys.modules}, time.process_time()
take(["kernels", "models", "data", "training", "tasks", "train"])
print(time.process_time() / libraries, *{*sys.modules} - before)
"""


@pytest.mark.thorough
def test_imports_take_twice_the_libraries_at_most_and_nothing_needless():
    status, printed, said = run_program("-c", IMPORTS)
    assert status == 0, said
    share, *found = printed.splitlines()[-1].split()
    assert {"kernels.ring.attend", "models.decoder", "data.rows", "train"} <= {*found}
    assert NEEDLESS & {*found} == set()
    assert float(share) < 2, "of the processor time of JAX and its kin"
