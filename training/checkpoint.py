"""Checkpoints on Orbax: which step is there, is it ours and whole, save, bring back.

What a step holds is in `training/stored_step.py`.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from training.hosts import wait_for_all
from training.stored_step import (
    FINGERPRINT,
    META,
    STATE,
    DamagedStep,
    StoredStep,
    briefs,
    differences,
    leaves,
    make_meta,
    saved_briefs,
)

DAMAGED = "damaged"
"""Directory among the steps, for steps that are."""


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which leaves notices of preemption to the run.

    Its own question after each save would move the step at which the processes of a run
    have agreed to stop (see `training/preemption.py`).
    """

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The checkpoints of one run: asynchronous saves, restores onto any mesh.

    Every process of the run makes one and calls the same methods at the same steps.
    Close it, or use it as a context manager: the last save may still be on its way.

    A step is written under another name and renamed; only then older ones go. A save
    that fails, as on a full disk, is told, and the run goes on until the next; when
    that fails too, or there is no next, it is an error. What is found to be damaged at
    a restore moves to the directory `damaged`, and nothing but rotation deletes.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        fingerprint: Mapping[str, Any],
        say: Callable[[str], None] = print,
    ) -> None:
        """Opens the directory, and makes it where it is missing.

        Args:
          directory: local path, or a bucket (`gs://...`, which needs gcsfs).
          keep: number of newest steps that stay on disk.
          fingerprint: what makes a state unusable by another model (sizes, vocabulary
            and the like), as JSON values. Saved with every step, compared at restore.
          say: tells a person of damaged steps and failed saves.

        Raises:
          ValueError: if `keep` is below 1 or the fingerprint is not JSON.
        """
        if keep < 1:
            raise ValueError(f"{keep=} must be at least 1")
        self._fingerprint = _as_json(fingerprint)
        self._say = say
        self._latest_is_ours = False
        self._saving: int | None = None  # step of the save that may be under way
        self._failures: list[str] = []  # of the latest saves, without a good one
        self._half_saved: set[int] = set()
        self._keep = keep
        self._manager = _open(directory, keep, cleanup_tmp_directories=True)

    @property
    def directory(self) -> Path:
        """Where the steps are; a path that knows buckets too."""
        return self._manager.directory

    def latest_step(self) -> int | None:
        """The newest step, or None. Step 0 is a step: compare with `is None`."""
        return self._manager.latest_step()

    def check_fingerprint(self) -> None:
        """Refuses a directory of another model; an empty one passes.

        Reads one small JSON file: call it before anything is compiled.

        Raises:
          ValueError: if the newest step that can be read was saved by a different
            model, naming every differing key, or was not saved by this class; or if
            there are steps, but none can be read.
        """
        self._settle()
        damages = []
        for stored in self._newest_first():
            try:
                self._check_model(stored, stored.meta())
                break
            except DamagedStep as damage:
                damages.append(damage)
        else:
            self._refuse(damages)
        self._latest_is_ours = True

    def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the newest good step onto the shardings of `abstract_state`.

        The mesh, the ring size and the number of devices and hosts may differ from
        those of the run that saved; values are equal to the last bit. Newer steps that
        are damaged are told, and moved to the directory `damaged`.

        Args:
          abstract_state: the train state with a `jax.ShapeDtypeStruct` that carries a
            sharding (or an array) at each leaf.

        Returns:
          The state, and the meta data as saved.

        Raises:
          FileNotFoundError: if there is no step.
          ValueError: if no step is good, and nothing is moved then; or before any array
            is read, if the step belongs to another model (see `check_fingerprint`), or
            if a leaf is missing, unknown, or of another shape or dtype, by name.
        """
        self._settle()
        damages = {}
        for stored in self._newest_first():
            try:
                meta = stored.meta()
                self._check_model(stored, meta)
                _check_leaves(stored, meta, abstract_state)
                state = stored.read(abstract_state, meta)
                break
            except DamagedStep as damage:
                damages[stored] = damage
        else:
            self._refuse(list(damages.values()))
            raise FileNotFoundError(
                f"no checkpoint in {self._manager.directory}: nothing to restore"
            )
        for damaged, damage in damages.items():
            self._set_aside(damaged, damage)
        self._latest_is_ours = True
        return state, meta

    def save(self, step: int, state: Any) -> None:
        """Starts a save of `state`; the caller may donate it as soon as this returns.

        Waits for the save before, and tells what went wrong with that one.

        Args:
          step: number of updates made.
          state: the train state, a pytree of arrays.

        Raises:
          ValueError: if `step` is not newer than the newest step on disk, or if the
            steps on disk belong to another model. Nothing is written then.
          OSError: this save and the one before it failed, or the two before it.
        """
        self._settle()
        self._clear_half_saved()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{step=} is not newer than step {latest} in {self._manager.directory}:"
                " a saved step is never overwritten; restore it, or use another workdir"
            )
        if not self._latest_is_ours:
            self.check_fingerprint()
        meta = make_meta(step, self._fingerprint, state)
        self._saving = step
        try:
            self._manager.save(
                step,
                force=True,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta)
                ),
            )
        except Exception as error:
            self._fail(error)

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
            if kind is None:  # the error under way matters more, and this one was told
                raise

    def _settle(self) -> None:
        """Waits for the save under way, and takes note of how it ended."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._fail(error)
        else:
            if self._saving is not None:
                self._failures = []
        self._saving = None

    def _fail(self, error: Exception) -> None:
        """Tells of a failed save; raises OSError at the second in a row."""
        directory, step = self._manager.directory, self._saving
        self._saving = None
        self._half_saved.add(step)
        # It would raise late errors of this save at the next, and has struck out the
        # steps that it was going to delete.
        self._manager = _open(directory, self._keep, cleanup_tmp_directories=False)
        self._failures.append(
            f"step {step} was NOT saved in {directory}: {type(error).__name__}: "
            f"{error}; the newest checkpoint is that of step {self.latest_step()}"
        )
        if len(self._failures) > 1:
            raise OSError(
                f"{self._failures[-1]}. The save before it failed too, so the run ends"
            ) from error
        self._say(f"WARNING: {self._failures[-1]}")

    def _clear_half_saved(self) -> None:
        """Makes room: removes what failed saves have written under other names."""
        for step in self._half_saved if jax.process_index() == 0 else ():
            for rest in self._manager.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                # Of a file still open somewhere; the next run removes it.
                with contextlib.suppress(OSError):
                    rest.rmtree()
        self._half_saved.clear()

    def _newest_first(self) -> Iterator[StoredStep]:
        """All steps; on each process the same, as the manager sees to."""
        for step in sorted(self._manager.all_steps(), reverse=True):
            yield StoredStep(step, self._manager.directory / str(step))

    def _refuse(self, damages: list[DamagedStep]) -> None:
        """Raises ValueError if there is damage: a run must not begin anew over it."""
        if damages:
            raise ValueError(
                f"no checkpoint in {self._manager.directory} is good; repair one, or "
                "use another workdir to begin anew:\n  "
                + "\n  ".join(map(str, damages))
            )

    def _set_aside(self, stored: StoredStep, damage: DamagedStep) -> None:
        """Moves a step out of the way; deletes nothing."""
        names = [str(stored.step), *(f"{stored.step}.{n}" for n in range(1, 1000))]
        place = self._manager.directory / DAMAGED
        self._say(
            f"WARNING: step {stored.step} is damaged and moves to {place}: {damage}"
        )
        if jax.process_index() == 0:
            place.mkdir(exist_ok=True)
            free = next(name for name in names if not (place / name).exists())
            stored.directory.rename(place / free)
        wait_for_all(f"set aside {stored.step}")
        self._manager.reload()

    def _check_model(self, stored: StoredStep, meta: Mapping[str, Any]) -> None:
        """Compares a step's fingerprint with ours."""
        found = differences(leaves(meta[FINGERPRINT]), leaves(self._fingerprint))
        if found:
            raise ValueError(
                f"{stored} belongs to another model; use another workdir, or the"
                " configuration that it was saved with:\n  " + "\n  ".join(found)
            )


def _open(directory: str | Path, keep: int, **options: Any) -> Manager:
    return Manager(
        absolute(directory),
        item_handlers={
            STATE: ocp.StandardCheckpointHandler(),
            META: ocp.JsonCheckpointHandler(),
        },
        options=ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(keep), **options
        ),
    )


def _check_leaves(
    stored: StoredStep, meta: Mapping[str, Any], abstract_state: Any
) -> None:
    """Compares names, shapes and dtypes; Orbax would cast a dtype in silence."""
    wanted = leaves(abstract_state)
    homeless = [name for name, leaf in wanted.items() if leaf.sharding is None]
    if homeless:
        raise ValueError(
            f"{homeless[0]} of abstract_state has no sharding: give every"
            " ShapeDtypeStruct one"
        )
    found = differences(saved_briefs(meta), briefs(wanted))
    if found:
        raise ValueError(
            f"{stored} does not fit the train state; use another workdir, or the"
            " model and optimizer it was saved with:\n  " + "\n  ".join(found)
        )


def absolute(directory: str | Path) -> str | Path:
    """The path as Orbax wants it, absolute; a bucket is so already."""
    return directory if "://" in str(directory) else Path(directory).absolute()


def _as_json(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A copy as a JSON file gives it back, whatever the caller does to the original."""
    try:
        return json.loads(json.dumps(dict(fingerprint)))
    except TypeError as error:
        raise ValueError(
            f"{fingerprint=}: give numbers, strings, lists and dicts only: {error}"
        ) from error
