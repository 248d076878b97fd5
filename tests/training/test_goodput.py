"""Every second of a run counts once, over all its starts."""

import json
from typing import Any

import pytest

from training.goodput import KINDS, Goodput


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def make_steps(goodput: Goodput, clock: Clock, steps: range, seconds: float) -> None:
    goodput.switch("step")
    for step in steps:
        clock.now += seconds
        goodput.step(step)


def test_seconds_belong_to_what_was_going_on(clock):
    goodput = Goodput(clock)
    clock.now += 3
    with goodput.spend("compile"):
        clock.now += 5
    clock.now += 1
    goodput.switch("step")
    clock.now += 20
    with pytest.raises(ZeroDivisionError), goodput.spend("evaluation"):
        clock.now += 2
        with goodput.spend("save"):
            clock.now += 4
        raise ZeroDivisionError
    clock.now += 5
    points = goodput.points()
    spent = {"setup": 4, "compile": 5, "step": 25, "evaluation": 2, "save": 4}
    for kind in KINDS:
        assert points[f"goodput/{kind}_seconds"] == spent.get(kind, 0)
    assert points["goodput/fraction"] == 25 / 40
    assert str(goodput) == (
        "goodput 62.5 % of 40.0 s "
        "(setup 4.0, compile 5.0, step 25.0, save 4.0, evaluation 2.0)"
    )


def test_steps_that_are_made_again_are_lost(clock, tmp_path):
    record = tmp_path / "goodput.json"
    first = Goodput(clock, record_every_seconds=0)
    first.resume(record, 0)
    make_steps(first, clock, range(1, 18), seconds=2)
    # Killed after step 17; the checkpoint is that of step 10.
    clock.now += 1000
    again = Goodput(clock, record_every_seconds=0)
    clock.now += 6
    again.resume(record, 10)
    make_steps(again, clock, range(11, 16), seconds=3)
    seconds = {k: s for k, s in again.seconds.items() if s}
    assert seconds == {"setup": 6, "lost": 14, "step": 20 + 15}
    # And a third time: what a start has lost stays lost.
    third = Goodput(clock)
    third.resume(record, 13)
    assert third.seconds["lost"] == 14 + 2 * 3
    assert third.seconds["step"] == 20 + 9
    new = Goodput(clock)
    new.resume(record, 0)
    assert not any(new.seconds.values())


def altered(**fields: Any) -> str:
    values = {"step": 9, "seconds_per_step": 2.0, "seconds": dict.fromkeys(KINDS, 3.0)}
    return json.dumps(values | fields)


BAD_RECORDS = [
    *("", "[]", '{"step": 3}'),
    altered(step=10**400),
    altered(seconds_per_step=-1.0),
    altered(step="9"),
    altered(seconds_per_step=float("nan")),
    altered(seconds=None),
    altered(seconds=dict.fromkeys(KINDS[:-1], 3.0)),
]


@pytest.mark.parametrize("text", [None, *BAD_RECORDS], ids=range(10))
def test_a_record_that_cannot_be_read_does_not_stop_the_run(clock, tmp_path, text):
    record = tmp_path / "goodput.json"
    if text is not None:
        record.write_text(text)
    goodput, told = Goodput(clock), []
    goodput.resume(record, 7, told.append)
    assert not any(goodput.seconds.values())
    assert len(told) == (text is not None)
    for line in told:
        assert line.startswith(f"{record} is left out of the goodput: it ")
        assert line.isprintable() and len(line) < 300
    goodput.record(7)
    assert json.loads(record.read_text())["step"] == 7


def test_the_record_is_written_now_and_then_where_it_can_be(clock, tmp_path):
    record = tmp_path / "goodput.json"
    goodput = Goodput(clock, record_every_seconds=10)
    goodput.resume(record, 0)
    written = []
    for step in range(1, 9):
        make_steps(goodput, clock, range(step, step + 1), seconds=4)
        written.append(json.loads(record.read_text())["step"])
    assert written == [1, 1, 1, 4, 4, 4, 7, 7]
    assert [*tmp_path.iterdir()] == [record]
    nowhere = Goodput(clock)
    nowhere.resume(tmp_path / "nowhere" / "goodput.json", 0)
    make_steps(nowhere, clock, range(1, 3), seconds=4)
    nowhere.record(2)
    assert nowhere.seconds["step"] == 8
