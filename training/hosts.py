"""The processes of a run: how they find each other, and how they agree.

Each of them runs the same program on the same command line.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils


def all_agree(is_true: bool) -> bool:
    """Whether it is true on every process; every process has to call this."""
    if jax.process_count() == 1:
        return is_true
    return bool(np.all(multihost_utils.process_allgather(np.int32(is_true))))


def first_says(number: int) -> int:
    """The first process's number; every process has to call this."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def wait_for_all(name: str) -> None:
    """Returns when every process is here; `name` says where."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
