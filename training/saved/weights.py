"""Reads and writes the parameters of a model, without its optimizer.

They lie where a run keeps its checkpoints: in `state` of the newest step, under
`params`. Another run starts from them, and tools write them in other formats.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from training.hosts.processes import all_agree
from training.saved.checkpoint import Checkpoints, Manager
from training.saved.record import SETTINGS, agreed
from training.saved.stored_step import (
    FINGERPRINT,
    LEAVES,
    PARAMETERS,
    RECORD,
    DamagedStep,
    StoredStep,
    absolute,
    briefs,
    differences,
    leaves,
    listed,
    saved_briefs,
)

FLOATS = "float32", "bfloat16"
"""Types of parameters, which are read as either."""

ROTATED = 5
"""Times that the newest step is looked for, where a run deletes those it replaces."""


class SavedParameters:
    """The parameters of the newest step of a working directory; writes nothing there.

    step: number of updates that made them; 0 for imported ones.
    fingerprint: of their model, as it was saved (see `Checkpoints`).
    settings: of the run that saved them, by dotted name; empty where it kept none.
    rounded: how many of those read last have other values in the types asked for.
    """

    rounded: int = 0
    step: int
    fingerprint: dict[str, Any]
    settings: dict[str, Any]

    def __init__(self, workdir: str | Path):
        """Reads what there is, but no array.

        Args:
          workdir: of a run or of imported weights; local path, or a bucket.

        Raises:
          FileNotFoundError: no checkpoint is saved.
          ValueError: it was not saved by a run of ours, or is damaged; or processes of
            a run, which all call this, find other parameters there.
          OSError: it could not be read, several times.
        """
        self._workdir = workdir
        self._stored = self._newest()
        self._of_newest(self._read_meta)
        # Hosts with other files under one path would train the mean of two models.
        agreed(lambda: {f"the parameters of {workdir}": str(self)})

    def _of_newest[T](self, read: Callable[[], T]) -> T:
        """Reads from the newest step, or the next one if a run has deleted it since.

        read: raises DamagedStep if a part is missing, or is not as it was saved.
        """
        for _ in range(ROTATED):
            try:
                return read()
            except DamagedStep as damage:
                refused = self._stored
                error = damage
                self._stored = self._newest()
                # Damaged, and not rotated away, on every process: one that reads on
                # while others stop would hold another step, or wait for them.
                if all_agree(self._stored.step == refused.step):
                    break
        raise ValueError(
            f"step {refused.step} of {self._workdir} is damaged: {error}. Nothing was "
            "changed; move that step away to read the one before it, if there is one"
        ) from error

    def _read_meta(self) -> None:
        self.step = self._stored.step
        self._meta = self._stored.meta()
        self.fingerprint = self._meta[FINGERPRINT]
        self.settings = self._meta.get(RECORD, {}).get(SETTINGS, {})

    def _newest(self) -> StoredStep:
        directory = absolute(f"{self._workdir}/checkpoints")
        if isinstance(directory, Path) and not directory.is_dir():
            raise FileNotFoundError(f"{self._workdir} has no checkpoints to read")
        options = ocp.CheckpointManagerOptions(
            create=False, enable_async_checkpointing=False
        )
        for _ in range(ROTATED):  # a list may miss the new step, and the old one too
            with Manager(directory, options=options) as manager:
                step = manager.latest_step()
            if step is not None:
                return StoredStep(step, manager.directory / str(step))
        raise FileNotFoundError(f"{self._workdir} has no checkpoints to read")

    def __str__(self) -> str:
        return f"step {self.step} with digest {self.digest}"

    @property
    def digest(self) -> str:
        """Returns a digest of the saved digests of all parameters."""
        parameters = {}
        for name, leaf in self._meta[LEAVES].items():
            if name.startswith(f"{PARAMETERS}."):
                parameters[name] = leaf
        text = json.dumps(parameters, sort_keys=True).encode()
        return hashlib.sha256(text).hexdigest()[:16]

    def check_model(
        self, fingerprint: Mapping[str, Any], may_differ: Collection[str] = ()
    ) -> None:
        """Refuses parameters that belong to another model.

        fingerprint: of the model that they are for.
        may_differ: names of its fields that may have other values.

        Raises:
          ValueError: the models differ, naming every field and both its values.
        """
        differing = differences(
            leaves(self.fingerprint), leaves(fingerprint), may_differ
        )
        if differing:
            raise ValueError(
                f"the parameters of step {self.step} of {self._workdir} belong to "
                "another model; change config.model, or name in config.may_change what "
                f"may differ:\n  {listed(differing)}"
            )

    def restore(self, abstract: Any) -> Any:
        """Reads parameters onto the shardings of `abstract`; equal to the last bit.

        Parameters that were saved in other types are rounded to those of `abstract`,
        one at a time. If a run has deleted the step that was found, they are those of
        the newest one now: see `step`.

        abstract: `jax.ShapeDtypeStruct` with a sharding for each parameter to read; a
          part of the parameters' tree, or the whole.

        Raises:
          ValueError: before any array is read, if one is missing or of another shape,
            by name; or if one is missing, not as it was saved, or not finite.
          OSError: they could not be read, several times.
        """
        return self._of_newest(lambda: self._restore(abstract))

    def _restore(self, abstract: Any) -> Any:
        # Again, as the step that was found may have been replaced since.
        self._read_meta()
        saved = saved_briefs(self._meta)

        def as_saved(path: tuple, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            # Asked for another type Orbax casts, and the digest is of the bits saved.
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            dtype = saved.get(f"{PARAMETERS}.{name}", "").partition("[")[0]
            return leaf.update(dtype=dtype) if dtype in FLOATS else leaf

        stored = jax.tree_util.tree_map_with_path(as_saved, abstract)
        wanted = briefs(leaves({PARAMETERS: stored}))
        of_wanted = {name: saved[name] for name in wanted if name in saved}
        differing = differences(of_wanted, wanted)
        if differing:
            raise ValueError(
                f"the parameters of step {self.step} of {self._workdir} do not fit the "
                f"model:\n  {listed(differing)}"
            )
        if briefs(leaves(stored)) == briefs(leaves(abstract)):
            return self._read(stored)
        like, tree = jax.tree.flatten(abstract)
        self.rounded = 0
        parameters = []
        # One at a time: a model in its saved type beside one in ours may not fit.
        for number, leaf in enumerate(jax.tree.leaves(stored)):
            alone: list[jax.ShapeDtypeStruct | None] = [None] * len(like)
            alone[number] = leaf
            (read,) = jax.tree.leaves(self._read(jax.tree.unflatten(tree, alone)))
            parameters.append(read.astype(like[number].dtype))
            self.rounded += not _is_equal(read, parameters[-1])
        return jax.tree.unflatten(tree, parameters)

    def _read(self, part: Any) -> Any:
        return self._stored.read({PARAMETERS: part}, self._meta)[PARAMETERS]


@jax.jit
def _is_equal(x: jax.Array, other: jax.Array) -> jax.Array:
    """Returns whether all values of two arrays are the same, whatever their types."""
    return (x.astype(jnp.float32) == other.astype(jnp.float32)).all()


def save_parameters(
    workdir: str | Path, parameters: Any, fingerprint: Mapping[str, Any]
) -> None:
    """Writes parameters alone, as step 0 of a new working directory.

    Raises:
      ValueError: the directory has checkpoints, or a parameter is not finite; nothing
        is written then.
    """
    with Checkpoints(
        f"{workdir}/checkpoints", keep=1, fingerprint=fingerprint
    ) as checkpoints:
        checkpoints.save(0, {PARAMETERS: parameters})
