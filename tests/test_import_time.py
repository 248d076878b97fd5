"""Importing the tree takes little time of its own, and the library nothing needless."""

import json

from tests.processes import run_program

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
    for name in set(names) - {"kernels.triton_gpu.kernels"}:
        module = importlib.import_module(name)
        folder = getattr(module, "__path__", ())
        take(f"{name}.{found.name}" for found in pkgutil.iter_modules(folder))

library, programs = (argument.split() for argument in sys.argv[1:])
before = {*sys.modules}
begin = time.process_time()
take(library)
seconds, modules = time.process_time() - begin, sorted({*sys.modules} - before)
import matplotlib.figure
begin = time.process_time()
take(programs)
seconds += time.process_time() - begin
print(json.dumps([seconds, modules, sorted(sys.modules)]))
"""


def test_imports_take_two_seconds_and_the_librarys_are_not_needless():
    arguments = " ".join(LIBRARY), " ".join(PROGRAMS)
    status, printed, said = run_program("-c", PROGRAM, *arguments)
    assert status == 0, said
    seconds, of_library, everything = json.loads(printed.splitlines()[-1])
    assert {"kernels.ring", "models.decoder", "data.text"} <= set(of_library)
    assert {"train", "tools.plan_pod", "configs.tiny"} <= set(everything)
    assert NEEDLESS & set(of_library) == set()
    assert seconds < 2, f"{seconds:.1f} s of processor time, beside JAX and its kin"
