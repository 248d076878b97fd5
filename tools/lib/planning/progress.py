"""Reports the running time of a long operation."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from typing import TextIO

TERMINAL_SECONDS, LINE_SECONDS = 1.0, 30.0
"""Between updates of a terminal's line, and between lines of a file or a pipe."""


@contextlib.contextmanager
def progress(
    what: str,
    stream: TextIO,
    every: tuple[float, float] = (TERMINAL_SECONDS, LINE_SECONDS),
) -> Iterator[None]:
    """Reports to a stream what the block does, and the seconds so far.

    On a terminal that is one line, erased at the end.

    every: seconds between updates of a terminal's line, and between lines elsewhere.
    """
    is_terminal = stream.isatty()
    over, start = threading.Event(), time.monotonic()
    room = shutil.get_terminal_size().columns - 1  # a line that wraps is not rewritten

    def report() -> None:
        while True:
            line = f"{what}: {time.monotonic() - start:.0f} s so far"
            line = f"\r\x1b[K{line[:room]}" if is_terminal else f"{line}\n"
            stream.write(line)
            stream.flush()
            if over.wait(every[not is_terminal]):
                return

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        over.set()
        reporter.join()
        if is_terminal:
            stream.write("\r\x1b[K")
            stream.flush()
