"""Importing the tree takes twice its libraries' time at most, and nothing needless."""

import json

import pytest

from tests.processes import run_program

pytestmark = pytest.mark.thorough

LIBRARY = "kernels", "models", "data", "training"
PROGRAMS = "tasks", "train", "configs", "tools"

# What the library must not import by being imported.
NEEDLESS = {"dm_control", "matplotlib", "mujoco", "tensorflow", "torch", "transformers"}
NEEDLESS |= {"jax_triton", "pandas", "pyarrow", "pytest", "scipy.stats", "triton"}

PROGRAM = """\
import importlib, json, pkgutil, sys, time
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

library, programs = (argument.split() for argument in sys.argv[1:])
before = {*sys.modules}
libraries = begin = time.process_time()
take(library)
seconds, modules = time.process_time() - begin, sorted({*sys.modules} - before)
import matplotlib.figure
begin = time.process_time()
take(programs)
seconds += time.process_time() - begin
print(json.dumps([seconds / libraries, modules, sorted(sys.modules)]))
"""


def test_imports_take_twice_the_libraries_at_most_and_nothing_needless():
    arguments = " ".join(LIBRARY), " ".join(PROGRAMS)
    status, printed, said = run_program("-c", PROGRAM, *arguments)
    assert status == 0, said
    share, of_library, everything = json.loads(printed.splitlines()[-1])
    assert {"kernels.ring.attend", "models.decoder", "data.rows"} <= set(of_library)
    assert {"train", "tools.plan_pod", "configs.tiny"} <= set(everything)
    assert NEEDLESS & set(of_library) == set()
    assert share < 2, "of the processor time of JAX and its kin"
