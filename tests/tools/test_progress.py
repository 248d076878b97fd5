"""What is told of something that goes on, on terminals and in files."""

import re
import time

import pytest

from tools.lib.planning.progress import progress


class Stream(list):
    """Remembers what was written, each time apart."""

    write = list.append

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.isatty = lambda: is_terminal

    def flush(self) -> None:
        pass


def tell(times: int, *, is_terminal: bool) -> Stream:
    stream = Stream(is_terminal)
    with progress("compiling a step", stream, every=(0.001, 0.001)):
        while len(stream) < times:
            time.sleep(0.001)
    return stream


def test_a_terminal_has_one_line_that_is_gone_at_the_end():
    *lines, last = tell(3, is_terminal=True)
    for line in lines:
        assert re.fullmatch(r"\r\x1b\[Kcompiling a step: \d+ s so far", line)
    assert last == "\r\x1b[K"


def test_an_error_ends_it():
    stream = Stream(is_terminal=True)
    with pytest.raises(ValueError, match="too large"), progress("compiling", stream):
        raise ValueError("too large")
    told = len(stream)
    assert stream[-1] == "\r\x1b[K"
    time.sleep(0.01)
    assert len(stream) == told
