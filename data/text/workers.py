"""Processes that make the parts of a corpus, on all cores of a machine."""

import functools
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, process
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from tqdm import tqdm

from data.text import units
from data.text.parts import Part, PartMaker
from data.text.row_files import InputFile
from data.text.units import Unit, units_of


def make_parts(
    maker: PartMaker, files: Sequence[InputFile], workers: int | None = None
) -> Iterator[Part]:
    """Yields the parts of the files, in their order, made by several processes.

    A bar counts bytes and tokens; it is silent where standard error is not a terminal.

    workers: processes, each with one thread of the tokenizer; 1: this process alone,
      whose tokenizer takes all cores. None: as many as there are cores, and units.

    Raises:
      OSError, ValueError: as `PartMaker.make`, or a process was killed.
    """
    size = sum(file.path.stat().st_size for file in files)
    workers = min(workers or os.cpu_count() or 1, -(-size // units.UNIT_BYTES) or 1)
    bar = tqdm(total=size, unit="B", unit_scale=True, disable=None)
    bar.set_description("1 process" if workers == 1 else f"{workers} processes")
    tokens = done = 0

    def tick(characters: int) -> None:
        bar.update(min(characters, size - bar.n))

    with bar:
        found = units_of(files)
        made = (
            _alone(maker, found, tick) if workers == 1 else _pool(maker, found, workers)
        )
        for unit, part in made:
            tokens, done = tokens + part.tokens, done + unit.bytes
            bar.update(done - bar.n)
            seconds = bar.format_dict["elapsed"] or 1
            bar.set_postfix_str(f"{tokens / seconds:,.0f} tokens/s", refresh=False)
            yield part


def _alone(
    maker: PartMaker, found: Iterator[Unit], tick: Callable[[int], object]
) -> Iterator[tuple[Unit, Part]]:
    for unit in found:
        yield unit, maker.find(unit) or Part.open(maker.make(unit, tick))


def _pool(
    maker: PartMaker, found: Iterator[Unit], workers: int
) -> Iterator[tuple[Unit, Part]]:
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (reader,))
    pickled, waiting = pickle.dumps(maker), deque()

    def first() -> tuple[Unit, Part]:
        unit, part = waiting.popleft()
        return unit, Part.open(part.result()) if isinstance(part, Future) else part

    try:
        for unit in found:
            part = maker.find(unit) or pool.submit(_make, pickled, unit)
            waiting.append((unit, part))
            # A long file at the front holds up no worker.
            if len(waiting) == 16 * workers:
                yield first()
        while waiting:
            yield first()
    except process.BrokenProcessPool as error:
        raise OSError(
            "a process of the preparation was killed, as where memory is short: run "
            "the same command again, which goes on from the finished parts, or take "
            f"fewer processes than {workers} (--workers)"
        ) from error
    finally:
        writer.close()  # which ends the workers
        pool.shutdown(cancel_futures=True)


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
