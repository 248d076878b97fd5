"""Who makes the parts of a corpus: processes of this machine, or of a Ray cluster."""

import contextlib
import functools
import logging
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, process
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from data.progress import progress
from data.text.reading import units
from data.text.reading.parts import Part, PartMaker, open_part
from data.text.reading.row_files import InputFile
from data.text.reading.units import Unit, units_of

Start = Callable[[Unit], Callable[[], Path]]
"""Begins with a unit; what it returns waits until its part is made, and says where."""
MOST_LOST = 3
"""Times that a unit is begun again, as where a node is lost."""


def make_parts(
    maker: PartMaker, files: Sequence[InputFile], workers: int | str | None = None
) -> Iterator[Part]:
    """Yields the parts of the files, in their order, made by several processes.

    A bar counts bytes and tokens (see `progress`).

    workers: processes, each with one thread of the tokenizer; 1: this process alone,
      whose tokenizer takes all cores. None: as many as there are cores, and units.
      Or the address of a Ray cluster, whose cores take the place of this machine's;
      its nodes have files and parts under the same paths.

    Raises:
      OSError, ValueError: as `PartMaker.make`; a process was killed; or the cluster
        cannot be reached.
    """
    size = sum(file.path.stat().st_size for file in files)
    if isinstance(workers, str):
        among = _cluster(maker, workers)
    else:
        parts = -(-size // units.UNIT_BYTES) or 1
        among = _machine(maker, min(workers or os.cpu_count() or 1, parts))
    tokens = 0
    with progress(size, "B") as bar, among as (start, count):
        bar.set_description("1 process" if count == 1 else f"{count} processes")
        # A long file at the front holds up no worker.
        most = 16 * count if count > 1 else 1
        for unit, path in _in_order(units_of(files), start, most):
            part = open_part(path)
            tokens += part.tokens
            bar.update(unit.bytes)
            seconds = bar.format_dict["elapsed"] or 1
            bar.set_postfix_str(f"{tokens / seconds:,.0f} tokens/s", refresh=False)
            yield part


def _in_order(
    inputs: Iterator[Unit], start: Start, most: int
) -> Iterator[tuple[Unit, Path]]:
    """Yields units with their parts. most: units that are begun, or wait."""
    waiting: deque[tuple[Unit, Callable[[], Path]]] = deque()
    for unit in inputs:
        waiting.append((unit, start(unit)))
        if len(waiting) == most:
            unit, wait = waiting.popleft()
            yield unit, wait()
    for unit, wait in waiting:
        yield unit, wait()


@contextlib.contextmanager
def _machine(maker: PartMaker, workers: int) -> Iterator[tuple[Start, int]]:
    """Gives processes of this machine, or this one alone."""
    if workers == 1:
        yield lambda unit: functools.partial(maker.make, unit), 1
        return
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (reader,))
    pickled = pickle.dumps(maker)
    try:
        yield lambda unit: pool.submit(_make, pickled, unit).result, workers
    except process.BrokenProcessPool as error:
        raise OSError(
            "a process of the preparation was killed, as where memory is short: run "
            "the same command again, which goes on from the finished parts, or take "
            f"fewer processes than {workers} (--workers)"
        ) from error
    finally:
        writer.close()  # which ends the workers
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _cluster(maker: PartMaker, address: str) -> Iterator[tuple[Start, int]]:
    """Gives the cores of a Ray cluster, whose lost tasks begin again on others."""
    try:
        import ray
    except ImportError as error:
        install = "install what requirements/ray.txt pins (make venv ACCELERATOR=ray)"
        raise ImportError(f"--ray {address} needs ray: {install}") from error

    def wait(made: ray.ObjectRef) -> Path:
        try:
            return ray.get(made)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    try:
        # Its workers look for this program where it is here.
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
        make = ray.remote(max_retries=MOST_LOST)(_make)
        pickled = pickle.dumps(maker)
        cores = int(ray.cluster_resources()["CPU"])
        yield lambda unit: functools.partial(wait, make.remote(pickled, unit)), cores
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise OSError(
            f"the Ray cluster {address} cannot go on ({' '.join(str(error).split())}): "
            "see to its nodes (ray status) and run the same command again, which goes "
            "on from the finished parts"
        ) from error
    finally:
        ray.shutdown()


def _begin_worker(alive: Connection) -> None:
    """Ends this process as soon as the one that started it is gone, or wants that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = threading.Thread(target=lambda: (alive.poll(None), os._exit(1)), daemon=True)
    end.start()


@functools.cache
def _opened(pickled: bytes) -> PartMaker:
    maker = pickle.loads(pickled)
    maker.tokenizer.use_one_thread()
    return maker


def _make(pickled: bytes, unit: Unit) -> Path:
    return _opened(pickled).make(unit)
