"""Says what is going on, and for how long it has been."""

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
    """Tells a stream, while the block runs, what it does and the seconds so far.

    On a terminal that is one line, which is gone at the end.

    every: seconds between updates of a terminal's line, and between lines elsewhere.
    """
    is_terminal = stream.isatty()
    over, start = threading.Event(), time.monotonic()
    room = shutil.get_terminal_size().columns - 1  # a line that wraps is not rewritten

    def tell() -> None:
        while True:
            line = f"{what}: {time.monotonic() - start:.0f} s so far"
            line = f"\r\x1b[K{line[:room]}" if is_terminal else f"{line}\n"
            stream.write(line)
            stream.flush()
            if over.wait(every[not is_terminal]):
                return

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()
        if is_terminal:
            stream.write("\r\x1b[K")
            stream.flush()
