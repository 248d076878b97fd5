"""The processes of a run: how they find each other, and how they agree.

Each of them runs the same program on the same command line.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

NOT_DETECTED = "coordinator_address should be defined"
"""What JAX says where it finds no cluster."""


def connect(coordinator: str, count: int, index: int) -> None:
    """Makes this process one of many; call it before anything else of JAX.

    Args:
      coordinator: host:port of the first process; "": JAX asks Cloud TPU (also on GKE),
        SLURM or Open MPI, and where there is none of them, the process is alone.
      count: of the processes; index: of this one, from 0. Both only with `coordinator`.

    Raises:
      ValueError: a part is missing or makes no sense.
      RuntimeError: the others cannot be reached.
    """
    if not coordinator:
        if count or index >= 0:
            raise ValueError(
                f"hosts: {count=} {index=} need a coordinator: give "
                "config.hosts.coordinator=HOST:PORT of the first process, or none of "
                "the three, for what the cluster says"
            )
        try:
            jax.distributed.initialize()
        except ValueError as error:
            if NOT_DETECTED not in str(error):
                raise
        return
    if not 0 <= index < count or ":" not in coordinator:
        raise ValueError(
            f"hosts: {coordinator=} {count=} {index=}: give HOST:PORT, and an index "
            "from 0 to count - 1"
        )
    jax.distributed.initialize(coordinator, count, index)


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
