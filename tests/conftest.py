"""Tests run on 8 simulated CPU devices with strict numeric promotion.

Unless JAX_PLATFORMS names an accelerator: then they run on it. ANNULUS_TEST_SEED=N
gives the fixture `rng` the seed that a failed test printed.
"""

import gc
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.support import tiers

# Nearly all that tests compute is small: compiling takes the time. A third of it goes.
COMPILE_FAST = (
    " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# Most objects that JAX makes stay: looking for garbage often takes a tenth of the time.
gc.set_threshold(200_000, 20, 100)

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + COMPILE_FAST
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


# Every compiled program takes some of the 65,530 mappings that Linux gives a process,
# and LLVM ends the process once all are taken.
MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 25_000


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(tiers)


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Drops compiled programs after a file that leaves too many of them."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Returns a generator with a seed of its own for each test; failures show it."""
    seed = int(os.environ.get("ANNULUS_TEST_SEED") or secrets.randbits(32))
    request.node.add_report_section("setup", "rng", f"ANNULUS_TEST_SEED={seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small corpus of bytes; tests must not change it."""
    from tests.small.runs import prepare_corpus

    return prepare_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keeps compiled programs for the files and workers of one `pytest`."""
    from tests.small.runs import kept_in

    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        directory = directory.parent
    directory /= "programs"
    directory.mkdir(exist_ok=True)
    with kept_in(directory):
        yield directory
