"""Saves and restores a run's checkpoints with Orbax.

The contents of a step are in `training/saved/stored_step.py`.
"""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from etils import epath

from training.hosts.processes import first_says, wait_for_all
from training.saved.stored_step import (
    FINGERPRINT,
    META,
    RECORD,
    STATE,
    AnyPath,
    DamagedStep,
    StoredStep,
    absolute,
    differences,
    leaves,
    listed,
    make_meta,
    together,
)
from training.saved.workdir import make_writable

STEP = re.compile("0|[1-9][0-9]*")
"""Names of finished steps."""

DAMAGED = "damaged"
"""Directory for damaged steps, beside the good ones."""


class Checkpoints:
    """The checkpoints of one run: asynchronous saves, restores onto any mesh.

    Every process of the run makes one and calls the same methods at the same steps.
    Close it, or use it as a context manager: the last save may still be running.

    A step is written under a temporary name and renamed; only then are older steps
    deleted, and nothing else deletes any.

    record: JSON values of the run, saved with every step from then on.
    """

    record: Mapping[str, Any]

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        fingerprint: Mapping[str, Any],
        say: Callable[[str], None] = print,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Opens the directory; creates it where it is missing.

        Args:
          directory: local path, or a bucket (`gs://...`, which needs gcsfs).
          keep: number of newest steps that stay on disk.
          fingerprint: what makes a state unusable by another model (sizes, vocabulary
            and the like), as JSON values. Saved with every step, compared at restore.
          say: logs damaged steps and failed saves.
          sleep: waits for this many seconds, before a step is read again.

        Raises:
          OSError: if the directory cannot be made or written to.
        """
        # As JSON gives it back: a tuple becomes a list, which is another value.
        self._fingerprint = json.loads(json.dumps(dict(fingerprint)))
        self.record = {}
        self._say = say
        self._sleep = sleep
        self._latest_is_ours = False
        self._saving: int | None = None  # step of the save that may be under way
        self._failures: list[str] = []  # of the latest saves, without a good one
        self._half_saved: set[int | None] = set()
        make_writable(directory)  # Orbax, where it cannot, waits for it for minutes
        self._newest = Newest(keep)
        self._manager = together(
            directory, lambda: open_manager(directory, self._newest, cleans=True), sleep
        )

    @property
    def directory(self) -> epath.Path:
        """Directory of the steps; may be in a bucket."""
        return self._manager.directory

    def latest_step(self) -> int | None:
        """Returns the newest step or None; step 0 is a step: compare with `is None`."""
        return self._manager.latest_step()

    def check_fingerprint(self) -> None:
        """Refuses a directory of another model; an empty one passes.

        Reads one small JSON file: call it before anything is compiled.

        Raises:
          ValueError: if the newest step that is not damaged was saved by a different
            model, naming every differing key, or was not saved by this class; or if
            there are steps, but all are damaged.
          OSError: if a step could not be read, several times.
        """
        self._newest_good(lambda *_: None)
        self._latest_is_ours = True

    def records(self) -> dict[int, dict[str, Any]]:
        """Returns the record of each step, the newest first, without damaged steps.

        It is empty for imported weights.
        """
        records = {}
        for stored in self._newest_first():
            with contextlib.suppress(DamagedStep):
                records[stored.step] = stored.meta().get(RECORD, {})
        return records

    def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the newest good step onto the shardings of `abstract_state`.

        The mesh, the ring size and the number of devices and hosts may differ from
        those of the run that saved; values are equal to the last bit. Newer steps that
        are damaged are logged, and moved to the directory `damaged`.

        Args:
          abstract_state: the train state with a `jax.ShapeDtypeStruct` that carries a
            sharding (or an array) at each leaf.

        Returns:
          The state, and the meta data as saved.

        Raises:
          FileNotFoundError: if no step is saved.
          ValueError: if no step is good, and nothing is moved then; or before any array
            is read, if the step belongs to another model (see `check_fingerprint`), or
            if a leaf is missing, unknown, or of another shape or dtype, by name.
          OSError: if a step could not be read, several times. Nothing is moved then.
        """

        def read(stored: StoredStep, meta: dict[str, Any]) -> tuple[Any, dict]:
            stored.check_leaves(meta, abstract_state)
            return stored.read(abstract_state, meta), meta

        restored, damages = self._newest_good(read)
        if restored is None:
            raise FileNotFoundError(f"no checkpoint in {self.directory} to restore")
        # Only once a good step is read: a reader's own fault would move all steps away.
        for damaged, damage in damages.items():
            self._set_aside(damaged, "is damaged", damage)
        self._latest_is_ours = True
        return restored

    def save(self, step: int, state: Any, *, rotate: bool = True) -> None:
        """Starts a save of `state`; the caller may donate it as soon as this returns.

        Waits for the save before, and logs its failure.

        Args:
          step: number of updates made.
          state: the train state, a pytree of arrays.
          rotate: whether older steps than the newest `keep` go.

        Raises:
          NotFinite: an array of the state holds nan or inf. Nothing is written then.
          ValueError: if `step` is not newer than the newest on disk, or if the steps on
            disk belong to another model. Nothing is written then.
          OSError: this save and the one before it failed, or the two before it.
        """
        self._settle()
        self._clear_half_saved()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{step=} is not newer than step {latest} in {self.directory}:"
                " a saved step is never overwritten; restore it, or use another workdir"
            )
        # Another model's steps would be rotated away by ours, one a save.
        if not self._latest_is_ours:
            self.check_fingerprint()
        meta = make_meta(step, self._fingerprint, self.record, state)
        self._saving = step
        self._newest.rotates = rotate  # asked as the save begins, obeyed at its end
        try:
            arrays = ocp.args.StandardSave(state)
            items = ocp.args.Composite(state=arrays, meta=ocp.args.JsonSave(meta))
            self._manager.save(step, force=True, args=items)
        except Exception as error:
            self._fail(step, error)

    def distrust(self, first: int, why: str) -> None:
        """Moves the steps from `first` on to `damaged`, so that an older one is newest.

        They stay if there is no older step, and if steps of their numbers were moved
        before: the run has made these again, and they were no better.

        why: what is wrong with them, for a person.
        """
        self._settle()
        doubted = [stored for stored in self._newest_first() if stored.step >= first]
        # One process may see a bucket's listing late: the first decides for all, or
        # they would restore different steps.
        damaged = self.directory / DAMAGED
        again = any((damaged / str(stored.step)).exists() for stored in doubted)
        if len(doubted) < len(self._manager.all_steps()) and not first_says(again):
            for stored in doubted:
                self._set_aside(stored, "is not trusted", why)

    def close(self) -> None:
        """Waits for the save under way.

        Raises:
          OSError: it failed, or the last one did.
        """
        self._settle()
        self._clear_half_saved()
        self._manager.close()
        if self._failures:
            raise OSError(self._failures[-1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:  # an error under way matters more, and this was logged
                raise

    def _settle(self) -> None:
        """Waits for the save under way, and records its failure."""
        # A save fails in a thread: its error is raised here, or else at the next save.
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(self._saving, error)
        else:
            if self._saving is not None:
                self._failures = []
        self._saving = None

    def _fail(self, step: int | None, error: Exception) -> None:
        """Logs a failed save; raises OSError at the second in a row."""
        self._saving = None
        self._half_saved.add(step)
        # It would raise late errors of this save at the next, and has struck out the
        # steps that it was going to delete.
        self._manager = open_manager(self.directory, self._newest, cleans=False)
        newest = self.latest_step()
        kept = "none" if newest is None else f"step {newest}"
        self._failures.append(
            f"step {step} was NOT saved in {self.directory}: {type(error).__name__}: "
            f"{error}; newest checkpoint: {kept}"
        )
        if len(self._failures) > 1:
            raise OSError(
                f"{self._failures[-1]}. The save before it failed too, so the run ends"
            ) from error
        self._say(f"WARNING: {self._failures[-1]}")

    def _clear_half_saved(self) -> None:
        """Removes what failed saves have written under temporary names."""
        for step in self._half_saved if jax.process_index() == 0 else ():
            for rest in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                # Of a file still open somewhere; the next run removes it.
                with contextlib.suppress(OSError):
                    rest.rmtree()
        self._half_saved.clear()

    def _newest_first(self) -> Iterator[StoredStep]:
        """Yields all steps; the manager makes them the same on each process."""
        for step in sorted(self._manager.all_steps(), reverse=True):
            yield StoredStep(step, self.directory / str(step), self._sleep)

    def _newest_good[T](
        self, read: Callable[[StoredStep, dict[str, Any]], T]
    ) -> tuple[T | None, dict[StoredStep, DamagedStep]]:
        """Reads the newest good step, of our model; None where there is no step.

        read: from a step and its meta data.

        Returns:
          Its result, and the damage of newer steps.

        Raises:
          ValueError: all steps are damaged: a run must not start over on them.
        """
        self._settle()
        damages = {}
        for stored in self._newest_first():
            try:
                meta = stored.meta()
                self._check_model(stored, meta)
                return read(stored, meta), damages
            except DamagedStep as damage:
                damages[stored] = damage
        if damages:
            every = "\n  ".join(map(str, damages.values()))
            raise ValueError(
                f"no checkpoint in {self.directory} is good; repair one, or "
                f"use another workdir to start over:\n  {every}"
            )
        return None, damages

    def _set_aside(self, stored: StoredStep, what: str, why: object) -> None:
        """Moves a step out of the way; deletes nothing."""
        step = stored.step
        damaged = self.directory / DAMAGED
        self._say(f"WARNING: step {step} {what} and moves to {damaged}: {why}")
        if jax.process_index() == 0:
            damaged.mkdir(exist_ok=True)
            target = damaged / str(step)
            number = 1
            while target.exists():  # the step was made again, and set aside again
                target = damaged / f"{step}.{number}"
                number += 1
            stored.directory.rename(target)
        # Processes that list the steps before the rename would restore this one.
        wait_for_all(f"set aside {step}")
        self._manager.reload()

    def _check_model(self, stored: StoredStep, meta: Mapping[str, Any]) -> None:
        """Compares a step's fingerprint with ours."""
        differing = differences(leaves(meta[FINGERPRINT]), leaves(self._fingerprint))
        if differing:
            raise ValueError(
                f"{stored} belongs to another model; use another workdir, or the"
                f" configuration that it was saved with:\n  {listed(differing)}"
            )


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which drops no step and leaves notices of preemption to the run.

    Orbax's check for preemption after each save would move the step at which the
    processes of a run have agreed to stop (see `training/hosts/preemption.py`).
    """

    def reached_preemption(self, step: int) -> bool:
        return False

    def _load_checkpoint_infos(self, *args: Any, **options: Any) -> list[Any]:
        """Lists the steps; raises OSError where Orbax drops one whose `stat` failed."""
        paths = []
        with contextlib.suppress(FileNotFoundError):  # a bucket without objects
            paths = list(self.directory.iterdir())
        infos = super()._load_checkpoint_infos(*args, **options)
        listed_steps = {str(info.step) for info in infos}
        for path in paths:
            is_dropped = STEP.fullmatch(path.name) and path.name not in listed_steps
            if is_dropped and _is_finished(path):
                raise OSError(f"{path} is there, but could not be looked at")
        return infos


class Newest(ocp.checkpoint_managers.LatestN):
    """Keeps the newest n steps, or, while `rotates` is False, all that there are."""

    rotates = True

    def should_preserve(self, checkpoints: Sequence[Any], **rest: Any) -> list[bool]:
        preserved = super().should_preserve(checkpoints, **rest)
        return list(preserved) if self.rotates else [True] * len(preserved)


def _is_finished(directory: epath.Path) -> bool:
    """Returns whether a finished step is there; raises OSError if it cannot list it."""
    try:
        items = {path.name for path in directory.iterdir()}
    except (FileNotFoundError, NotADirectoryError):  # deleted since, or a file
        return False
    # In Google's buckets nothing is renamed: what is finished holds this file.
    is_google = str(directory).startswith("gs://")
    return not is_google or ocp.path.atomicity.COMMIT_SUCCESS_FILE in items


def open_manager(directory: AnyPath, newest: Newest, *, cleans: bool) -> Manager:
    """Opens a directory of steps, and makes it where it is missing.

    cleans: whether what earlier saves have left unfinished is removed.
    """
    options = ocp.CheckpointManagerOptions(
        preservation_policy=newest, cleanup_tmp_directories=cleans
    )
    handlers = {
        STATE: ocp.StandardCheckpointHandler(),
        META: ocp.JsonCheckpointHandler(),
    }
    return Manager(absolute(directory), item_handlers=handlers, options=options)
