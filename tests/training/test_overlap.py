"""On which chips collectives of parameters are asked to run beside the compute."""

import pytest

from training.chips import CHIPS, find
from training.overlap import OFFLOADS, parameter_options


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_options_are_those_that_the_chip_can_follow(chip):
    options = parameter_options(chip)
    if chip.name in ("TPU v5p", "TPU v6e", "TPU7x"):
        assert options.keys() == set(OFFLOADS) and len(OFFLOADS) == 3
    elif chip.name == "TPU v4":
        assert options.keys() == {"xla_enable_async_all_gather"}
    else:
        assert not options
    assert set(options.values()) <= {"true"}


def test_an_unknown_chip_has_none():
    assert parameter_options(find("cpu")) == {}
