"""The run that is disturbed, and what disturbs it."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import train
from tests.runs import Run, assert_equal_bits, small_flags

STEPS = 12
"""Of the undisturbed run, which saves at 4, 8 and 12 and validates at 6 and 12."""
SMALLER = {
    "model__num_layers": 1,
    "model__hidden_size": 16,
    "model__feed_forward_size": 24,
    "train__steps": STEPS,
    "train__validate_every_steps": 6,
    "checkpoint__save_every_steps": 4,
}
QUIET = {"train__validation_batches": 0}


class Small(Run):
    """A run that compiles fast."""

    def config(self, **overrides: Any) -> Any:
        return super().config(**SMALLER | overrides)

    def flags(self, **overrides: Any) -> list[str]:
        fields = SMALLER | self.fields | overrides
        return small_flags(self.corpus, self.workdir, **fields)

    def steps(self) -> set[str]:
        return {path.name for path in (self.workdir / "checkpoints").iterdir()}

    def train_and(self, act: Callable[[str], None], **overrides: Any) -> None:
        """Trains, and acts upon every line that is said."""

        def say(line: str) -> None:
            self.said.append(line)
            act(line)

        train.train(self.config(**overrides), say)

    def assert_goes_on(self, step: int, truth: Any) -> None:
        """From this step, and ends with the undisturbed run's state."""
        self.train()
        assert f"resuming from step {step}" in self.said
        assert_equal_bits(self.state(), truth)

    def warnings(self) -> list[str]:
        return [line for line in self.said if line.startswith("WARNING")]


def send_sigterm(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def send_ctrl_c(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def on(beginning: str, act: Callable[[str], None]) -> Callable[[str], None]:
    return lambda line: act(line) if line.startswith(beginning) else None


def before_call(
    patch: pytest.MonkeyPatch, place: Any, name: str, number: int, act: Any
) -> None:
    """Acts before a function's call of this number, from 1."""
    function, calls = getattr(place, name), []

    def wrapped(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == number:
            act()
        return function(*args, **options)

    patch.setattr(place, name, wrapped)
