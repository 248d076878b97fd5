"""Traces some steps of a run, for xprof."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax


class Profiler:
    """Writes a trace of some steps, of which `first` is the first; 0 for none.

    A run that is stopped in between has a trace of what it made. A directory has a
    trace of every host, under `plugins/profile/`, where TensorBoard looks for it.
    """

    def __init__(self, steps: str, directory: str, say: Callable[[str], None] = print):
        """Traces the steps in a config: "10-12", "10", or "" for none.

        Raises:
          ValueError: they are not written so, or do not begin with 1 or a later step.
        """
        first = 0
        last = 0
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", steps):
            first = int(match[1])
            last = int(match[2] or match[1])
        if steps and not 1 <= first <= last:
            raise ValueError(
                f'config.profile="{steps}" must be steps to trace, as in "10-12"'
            )
        self._directory = directory
        self._say = say
        self.first = first  # 0 for none
        self._last = last
        self._is_on = False

    @contextlib.contextmanager
    def step(self, step: int, after: Any) -> Iterator[None]:
        """Traces the block, in which a step is dispatched, if it is asked for.

        after: arrays of the step before; work that is under way does not belong to the
          trace.
        """
        if not self.first <= step <= self._last:
            yield
            return
        if not self._is_on:
            jax.block_until_ready(after)
            jax.profiler.start_trace(self._directory)
            self._is_on = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def stop_after(self, step: int, metrics: Any) -> None:
        """Ends the trace if this is its last step.

        metrics: of this step, which are waited for.
        """
        if self._is_on and step >= self._last:
            jax.block_until_ready(metrics)
            self.close()

    def close(self) -> None:
        """Ends the trace, if there is one."""
        if self._is_on:
            self._is_on = False
            jax.profiler.stop_trace()
            where = Path(self._directory) / "plugins" / "profile"
            self._say(f"trace: {where}, for xprof")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
