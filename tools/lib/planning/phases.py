"""How long the phases of a plan take, and took on this machine before."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from data.progress import progress
from tools.lib.files import write_json

FILE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
FILE = FILE / "annulus" / "plan_seconds.json"
"""Seconds by kind of plan and phase, the last ones."""


@contextlib.contextmanager
def phase(kind: str, name: str) -> Iterator[None]:
    """Shows how long a phase has taken, and what is left if it takes as long as before.

    kind: of the plan, of which others take about as long.
    """
    key = f"{name}: {kind}"
    before = _seconds().get(key)
    what = name if before is None else f"{name} ({before:.0f} s before)"
    start = time.monotonic()
    with progress(before, " s", what, timed=True):
        yield
    # Read again, as another plan may have been written since.
    seconds = _seconds() | {key: round(time.monotonic() - start, 1)}
    with contextlib.suppress(OSError):  # without it the next plan has no estimate
        FILE.parent.mkdir(parents=True, exist_ok=True)
        write_json(FILE, seconds)


def _seconds() -> dict[str, float]:
    """Reads the seconds of earlier plans; none where there is no such file."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(FILE.read_text()))
    return {}
