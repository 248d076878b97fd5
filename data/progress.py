"""Says how far a program is: a bar in a terminal, elsewhere a line a minute."""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm

LINE_SECONDS = 60.0
"""Between the lines that are printed where standard error is no terminal."""
BAR_SECONDS = 1.0
"""After which a bar is drawn again though nothing was done, as time goes on."""

LARGE = 10_000
"""Numbers from here on are written as 12.3k."""
CLOCK = "{l_bar}{bar}| [{elapsed}<{remaining}]"
ELAPSED = "{desc}: {elapsed}"
"""tqdm's formats without a rate, with and without a total."""


@contextlib.contextmanager
def progress(
    total: float | None, unit: str, what: str = "", *, done: float = 0, timed=False
) -> Iterator[tqdm]:
    """Gives a bar to `update`: what is done, what is left, and how long that takes.

    A program of less than a minute prints nothing where there is no terminal.

    Args:
      total: in the unit; None if it is not known.
      unit: as "B" or " steps", which stands behind a number.
      what: is done; `set_description` changes it.
      done: before the program began, as by an earlier one that was stopped.
      timed: the unit is a second, and the bar's own clock is what goes on.
    """
    is_terminal = sys.stderr.isatty()
    bar = tqdm(
        desc=what,
        total=total,
        initial=done,
        unit=unit,
        unit_scale=total is None or total >= LARGE,
        bar_format=(CLOCK if total else ELAPSED) if timed else None,
        leave=not timed,
        # In a pipe it would return to the begin of its line.
        file=None if is_terminal else io.StringIO(),
    )
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(BAR_SECONDS if is_terminal else LINE_SECONDS):
            if timed:
                bar.n = round(bar.format_dict["elapsed"])
            if is_terminal:
                bar.refresh()
            else:
                print(bar, file=sys.stderr, flush=True)

    repeating = threading.Thread(target=repeat, daemon=True)
    repeating.start()
    try:
        yield bar
    finally:
        is_over.set()
        repeating.join()
        bar.close()


def print_above(line: str) -> None:
    """Prints a line to the standard output, above a bar if there is one."""
    with tqdm.external_write_mode():
        print(line, flush=True)
