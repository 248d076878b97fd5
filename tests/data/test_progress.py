"""What is said of how far a program is, in a terminal and in a pipe."""

import io
import sys
import time

import pytest

from data import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_nothing_but_a_line_a_minute(capsys, monkeypatch):
    with progress.progress(40, " episodes", "own") as bar:
        bar.update(39)
        progress.print_above("a line")
    assert capsys.readouterr() == ("a line\n", "")
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    lines = ""
    with progress.progress(40, " episodes", "own", done=10) as bar:
        bar.update(20)
        bar.set_description("empty")
        while lines.count("\n") < 2:
            lines += capsys.readouterr().err
            time.sleep(0.01)
    first, second, *_ = lines.splitlines()
    for line in (first, second):
        assert line.startswith("empty:  75%|#######5  | 30/40 [00:00<00:0")
    assert "\r" not in lines


@pytest.mark.parametrize("before", [100, None])
def test_in_a_terminal_time_goes_on_while_nothing_is_done(before, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress, "BAR_SECONDS", 0.01)
    with progress.progress(before, " s", "compiling", timed=True):
        while "00:01" not in sys.stderr.getvalue():
            time.sleep(0.01)
    drawn = sys.stderr.getvalue()
    assert ("compiling:   1%|" in drawn) == bool(before)
    assert ("[00:01<01:" in drawn) == bool(before)
    assert drawn.endswith("\r")  # the next phase takes its line
