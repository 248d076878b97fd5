"""Connects the processes of a run, and lets them agree.

Each of them runs the same program on the same command line.
"""

import collections
import os
import re
import socket

import jax
import numpy as np
from jax._src.distributed import global_state  # its store has no public name
from jax.experimental import multihost_utils

from training.hosts.lost_processes import join

NOT_DETECTED = "coordinator_address should be defined"
"""JAX's error where it finds no cluster."""

LOOPBACK = re.compile(r"(localhost|127\.[0-9.]+|\[::1\]):")
"""Coordinators that processes of this machine alone can mean."""


def connect(
    coordinator: str,
    count: int,
    index: int,
    start_seconds: int = 300,
    lost_seconds: int = 100,
) -> None:
    """Makes this process one of many; call it before anything else of JAX.

    Ends the process with 1 where the others are not found, and from then on with
    `watchdog.HUNG` where one of them is lost (see `training/hosts/lost_processes.py`).

    Args:
      coordinator: host:port of the first process; "": JAX asks Cloud TPU (also on GKE),
        SLURM or Open MPI, and where there is none of them, the process is alone.
      count: of the processes; index: of this one, from 0. Both only with `coordinator`.
      start_seconds: how long it waits for the others.
      lost_seconds: how long a process may be silent before it counts as lost.

    Raises:
      ValueError: a part is missing or makes no sense; the port is in use; or processes
        were given different counts, on all of them alike.
    """
    times = {"start_seconds": start_seconds, "lost_seconds": lost_seconds}
    for name, seconds in times.items():
        if seconds < 1:
            raise ValueError(f"hosts: {name}={seconds} must be at least 1")
    options: dict[str, int | str] = {
        "initialization_timeout": start_seconds,
        "heartbeat_timeout_seconds": lost_seconds,
        "shutdown_timeout_seconds": lost_seconds,
    }
    if not coordinator:
        if count or index >= 0:
            raise ValueError(
                f"hosts: {count=} {index=} need a coordinator: give "
                "config.hosts.coordinator=HOST:PORT of the first process, or none of "
                "the three, for what the cluster says"
            )
        _join_cluster(options)
        return
    _check_address(coordinator, count, index)
    if LOOPBACK.match(coordinator):
        # JAX's own choice is every interface: others could join the run, or stop it.
        options["coordinator_bind_address"] = coordinator
    join(
        f"{coordinator=} {count=} {index=}",
        coordinator_address=coordinator,
        num_processes=count,
        process_id=index,
        **options,
    )
    _check_counts(count, index, start_seconds)


def _join_cluster(options: dict[str, int | str]) -> None:
    """Joins the processes that a cluster names; where there is none, returns alone.

    options: timeouts, as JAX names them.
    """
    try:
        join("of the cluster", **options)
    except ValueError as error:
        if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
            raise ValueError(
                f"hosts: JAX_COORDINATOR_ADDRESS={address} is set, and no cluster "
                f"says the rest ({error}): unset it, or give "
                "config.hosts.coordinator, count and index"
            ) from error
        if NOT_DETECTED not in str(error):
            raise


def _check_address(coordinator: str, count: int, index: int) -> None:
    """Raises ValueError if it is not HOST:PORT, or cannot be listened to here."""
    host, _, port = coordinator.rpartition(":")
    is_address = host and port.isdecimal() and 0 < int(port) < 2**16
    if not 0 <= index < count or not is_address:
        raise ValueError(
            f"hosts: {coordinator=} {count=} {index=}: give HOST:PORT, and an index "
            "from 0 to count - 1"
        )
    if index:
        return
    with socket.socket() as probe:  # JAX would share the port of another program
        # Else a port that a run has just left would count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise ValueError(
                f"hosts: {coordinator=}: the first process cannot listen on that port: "
                f"{error.strerror}; is it another run's? Give all processes a free one"
            ) from error


def _check_counts(count: int, index: int, seconds: int) -> None:
    """Refuses counts that differ; on all processes, before their devices connect.

    Devices of processes with different counts wait for each other until a timeout.
    """
    store = global_state.client
    assert store is not None  # as `join` has returned
    name = "annulus/count"
    milliseconds = seconds * 1000
    store.key_value_set(f"{name}/{index}", str(count))
    if index == 0:
        counts = []
        for other in range(count):
            key = f"{name}/{other}"
            counts.append(store.blocking_key_value_get(key, milliseconds))
        store.key_value_set(name, ", ".join(counts))
    # All judge the first one's list, so that all of them refuse, or none: one that went
    # on alone would wait for the devices of the others.
    given = store.blocking_key_value_get(name, milliseconds).split(", ")
    if len(set(given)) > 1:
        raise ValueError(
            f"hosts: count must be the same on every process, got {', '.join(given)} "
            f"on processes 0 to {len(given) - 1}"
        )


def all_agree(is_true: bool) -> bool:
    """Returns whether it is true on every process; all of them must call this."""
    if jax.process_count() == 1:
        return is_true
    return bool(np.all(multihost_utils.process_allgather(np.int32(is_true))))


def first_says(number: int) -> int:
    """Returns the first process's number; all of them must call this."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def tell_all(text: str) -> list[str]:
    """Returns each process's text, by its index; all of them must call this.

    Raises:
      ValueError: processes have different numbers of devices, so that no array can be
        gathered from all of them.
    """
    # `process_allgather` takes the devices as a rectangle, processes times devices.
    devices = collections.Counter(device.process_index for device in jax.devices())
    counts = [devices[index] for index in range(jax.process_count())]
    if len(set(counts)) > 1:
        raise ValueError(
            f"the processes have {', '.join(map(str, counts))} devices: give each the "
            "same number (config.simulated_devices)"
        )
    # Gathered arrays must have one shape on all processes, so sizes go first.
    text_bytes = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(text_bytes.size)).ravel()
    padded = np.pad(text_bytes, (0, sizes.max() - text_bytes.size))
    rows = multihost_utils.process_allgather(padded).reshape(sizes.size, -1)
    texts = []
    for row, size in zip(rows, sizes, strict=True):
        texts.append(row[:size].tobytes().decode())
    return texts


def wait_for_all(name: str) -> None:
    """Returns when every process is here; `name` says where."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
