"""Orbax's manager of the steps in a directory, as a run wants it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from training.stored_step import META, STATE


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which leaves notices of preemption to the run.

    Its own question after each save would move the step at which the processes of a run
    have agreed to stop (see `training/preemption.py`).
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Newest(ocp.checkpoint_managers.LatestN):
    """Keeps the newest n steps, or, while `rotates` is False, all that there are."""

    rotates = True

    def should_preserve(self, checkpoints: Sequence[Any], **rest: Any) -> list[bool]:
        preserved = super().should_preserve(checkpoints, **rest)
        return [is_new or not self.rotates for is_new in preserved]


def open_manager(directory: str | Path, newest: Newest, *, cleans: bool) -> Manager:
    """Opens a directory of steps, and makes it where it is missing.

    cleans: whether what earlier saves have left unfinished is removed.
    """
    return Manager(
        absolute(directory),
        item_handlers={
            STATE: ocp.StandardCheckpointHandler(),
            META: ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            preservation_policy=newest, cleanup_tmp_directories=cleans
        ),
    )


def absolute(directory: str | Path) -> str | Path:
    """Returns the absolute path that Orbax needs; a bucket already is."""
    return directory if "://" in str(directory) else Path(directory).absolute()
