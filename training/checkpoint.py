"""Checkpoints on Orbax: which step is there, is it ours, save it, bring it back.

A step directory holds two items: `state`, the train state's arrays, and `meta`, JSON
with the step and the fingerprint of the model that the arrays belong to.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

FINGERPRINT = "fingerprint"


class Checkpoints:
    """The checkpoints of one run: asynchronous saves, restores onto any mesh.

    Every process of the run makes one and calls the same methods at the same steps.
    Close it, or use it as a context manager: the last save may still be on its way.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        fingerprint: Mapping[str, Any],
    ) -> None:
        """Opens the directory, and makes it where it is missing.

        Args:
          directory: local path, or a bucket (`gs://...`, which needs gcsfs).
          keep: number of newest steps that stay on disk.
          fingerprint: what makes a state unusable by another model (sizes, vocabulary
            and the like), as JSON values. Saved with every step, compared at restore.

        Raises:
          ValueError: if `keep` is below 1 or the fingerprint is not JSON.
        """
        if keep < 1:
            raise ValueError(f"{keep=} must be at least 1")
        self._fingerprint = _as_json(fingerprint)
        self._latest_is_ours = False
        self._manager = ocp.CheckpointManager(
            absolute(directory),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
            options=ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep),
                cleanup_tmp_directories=True,
            ),
        )

    def latest_step(self) -> int | None:
        """The newest step, or None. Step 0 is a step: compare with `is None`."""
        return self._manager.latest_step()

    def check_fingerprint(self) -> None:
        """Refuses a directory of another model; an empty one passes.

        Reads one small JSON file: call it before anything is compiled.

        Raises:
          ValueError: if the newest step was saved by a different model, naming every
            differing key, or was not saved by this class.
        """
        self._manager.wait_until_finished()
        step = self.latest_step()
        if step is not None:
            self._checked_meta(step)
        self._latest_is_ours = True

    def restore(self, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        """Reads the newest step onto the shardings of `abstract_state`.

        The mesh, the ring size and the number of devices and hosts may differ from
        those of the run that saved; values are equal to the last bit.

        Args:
          abstract_state: the train state with a `jax.ShapeDtypeStruct` that carries a
            sharding (or an array) at each leaf.

        Returns:
          The state, and the meta data as saved.

        Raises:
          FileNotFoundError: if there is no step.
          ValueError: before any array is read, if the step belongs to another model
            (see `check_fingerprint`), or if a leaf is missing, unknown, or of another
            shape or dtype, by name.
        """
        self._manager.wait_until_finished()
        step = self.latest_step()
        if step is None:
            raise FileNotFoundError(
                f"no checkpoint in {self._manager.directory}: nothing to restore"
            )
        meta = self._checked_meta(step)
        self._latest_is_ours = True
        self._check_leaves(step, abstract_state)
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state)),
        )
        return restored.state, meta

    def save(self, step: int, state: Any) -> None:
        """Starts a save of `state`; the caller may donate it as soon as this returns.

        Waits for the save before, and raises what went wrong with that one.

        Args:
          step: number of updates made.
          state: the train state, a pytree of arrays.

        Raises:
          ValueError: if `step` is not newer than the newest step on disk, or if the
            steps on disk belong to another model. Nothing is written then.
        """
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise ValueError(
                f"{step=} is not newer than step {latest} in {self._manager.directory}:"
                " a saved step is never overwritten; restore it, or use another workdir"
            )
        if not self._latest_is_ours:
            self.check_fingerprint()
        self._manager.save(
            step,
            force=True,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                meta=ocp.args.JsonSave({"step": step, FINGERPRINT: self._fingerprint}),
            ),
        )

    def close(self) -> None:
        """Waits for the save under way and raises if it failed."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked_meta(self, step: int) -> dict[str, Any]:
        """Reads a step's meta data and compares its fingerprint with ours."""
        where = f"step {step} in {self._manager.directory}"
        try:
            meta = self._manager.restore(
                step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())
            ).meta
            saved = meta[FINGERPRINT]
        except KeyError as error:
            raise ValueError(
                f"{where} was not saved by this trainer ({error}): use another workdir"
            ) from error
        found = differences(leaves(saved), leaves(self._fingerprint))
        if found:
            raise ValueError(
                f"{where} belongs to another model; use another workdir, or the"
                " configuration that it was saved with:\n  " + "\n  ".join(found)
            )
        return meta

    def _check_leaves(self, step: int, abstract_state: Any) -> None:
        """Compares names, shapes and dtypes; Orbax would cast a dtype in silence."""
        where = f"step {step} in {self._manager.directory}"
        wanted = leaves(abstract_state)
        homeless = [name for name, leaf in wanted.items() if leaf.sharding is None]
        if homeless:
            raise ValueError(
                f"{homeless[0]} of abstract_state has no sharding: give every"
                " ShapeDtypeStruct one"
            )
        saved = self._manager.item_metadata(step).get("state")
        if saved is None:
            raise ValueError(f"{where} has no readable state: move that step away")
        found = differences(briefs(leaves(saved.tree)), briefs(wanted))
        if found:
            raise ValueError(
                f"{where} does not fit the train state; use another workdir, or the"
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


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path; a NamedTuple has those of the dict it is saved as."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def briefs(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Type and shape of every array."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()}


def differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """One line for each key that is not the same on both sides."""
    both = {
        key: (saved.get(key, "nothing"), ours.get(key, "nothing"))
        for key in sorted(saved.keys() | ours.keys())
    }
    return [
        f"{key}: saved {theirs}, this run {own}"
        for key, (theirs, own) in both.items()
        if theirs != own
    ]
