"""What is told of something that goes on, on terminals and in files."""

import io
import re
import time

import pytest

from tools.lib.planning.progress import progress


class Stream(io.StringIO):
    """Remembers what was written apart."""

    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal, self.written = is_terminal, []

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.written.append(text)
        return len(text)


def tell(stream: Stream, times: int) -> list[str]:
    with progress("compiling a step", stream, every=(0.001, 0.001)):
        while len(stream.written) < times:
            time.sleep(0.001)
    return stream.written


def test_files_get_whole_lines():
    for line in tell(Stream(is_terminal=False), times=3):
        assert re.fullmatch(r"compiling a step: \d+ s so far\n", line)


def test_a_terminal_has_one_line_that_is_gone_at_the_end():
    *lines, last = tell(Stream(is_terminal=True), times=3)
    for line in lines:
        assert re.fullmatch(r"\r\x1b\[Kcompiling a step: \d+ s so far", line)
    assert last == "\r\x1b[K"


def test_a_line_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    first, *_ = tell(Stream(is_terminal=True), times=1)
    assert first == "\r\x1b[Kcompiling a"


def test_an_error_ends_it():
    stream = Stream(is_terminal=True)
    with pytest.raises(ValueError, match="too large"), progress("compiling", stream):
        raise ValueError("too large")
    told = len(stream.written)
    assert stream.written[-1] == "\r\x1b[K"
    time.sleep(0.01)
    assert len(stream.written) == told
