"""One step on disk: what it says of itself, and whether what is read back is that.

A step directory holds two items: `state`, the train state's arrays, and `meta`, JSON
with the step, the fingerprint of the model that the arrays belong to, type, shape and
digest of each array, and a checksum of all of this. Orbax itself gives back whatever a
damaged file holds.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from training.digest import digests
from training.hosts import all_agree

STATE, META = "state", "meta"
FINGERPRINT, LEAVES, CHECKSUM = "fingerprint", "leaves", "crc32"

# Of errors that may be gone at the next attempt and say nothing about the files.
PASSING = (ConnectionError, MemoryError, PermissionError, TimeoutError)
PASSING_STATUS = (
    "DEADLINE_EXCEEDED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
    "UNAVAILABLE",
)


class DamagedStep(Exception):
    """What is on disk is not what was saved; says where and what differs."""


def make_meta(
    step: int, fingerprint: Mapping[str, Any], state: Any
) -> dict[str, int | dict]:
    """What `meta` holds of a state that is about to be saved."""
    briefly = briefs(leaves(state))
    found = digests(state)
    meta = {
        "step": step,
        FINGERPRINT: dict(fingerprint),
        LEAVES: {n: {"array": briefly[n], "digest": found[n]} for n in briefly},
    }
    return meta | {CHECKSUM: _checksum(meta)}


@dataclass(frozen=True)
class StoredStep:
    """A step that was saved.

    step: number of updates made.
    directory: of its items; a path as `CheckpointManager.directory` gives it.
    """

    step: int
    directory: Path

    def __str__(self) -> str:
        return f"step {self.step} in {self.directory.parent}"

    def meta(self) -> dict[str, Any]:
        """Reads the meta data; on all processes.

        Raises:
          ValueError: the step was not saved by this trainer.
          DamagedStep: it was, but on some process this cannot be read, or is not as it
            was written.
        """
        return self._together(self._read_meta)

    def read(self, abstract: Any, meta: Mapping[str, Any]) -> Any:
        """Reads arrays onto the shardings of `abstract`; on all processes.

        Args:
          abstract: `jax.ShapeDtypeStruct` with a sharding at each leaf; the whole
            state, or a part of its tree. `meta` has to hold all of them.
          meta: of this step.

        Raises:
          DamagedStep: on some process an array cannot be read, or it has other bits
            than the one that was saved.
        """
        state = self._together(lambda: self._read_arrays(abstract))
        saved = {name: leaf["digest"] for name, leaf in meta[LEAVES].items()}
        wrong = [name for name, x in digests(state).items() if saved[name] != x]
        if wrong:
            raise DamagedStep(
                f"{self.directory / STATE}: {wrong[0]} has other bits than when it was "
                f"saved (and {len(wrong) - 1} more arrays)"
            )
        return state

    def _together[T](self, read: Callable[[], T]) -> T:
        """What `read` gives, or DamagedStep on every process if it is so on one."""
        damage = None
        try:
            result = read()
        except DamagedStep as error:
            damage = error
        if not all_agree(damage is None):
            raise damage or DamagedStep(f"{self}: another process cannot read it")
        return result

    def _read_meta(self) -> dict[str, Any]:
        try:
            items = {path.name for path in self.directory.iterdir()}
            if items and not items & {STATE, META}:
                raise ValueError(
                    f"{self} was not saved by this trainer (it holds "
                    f"{', '.join(sorted(items))}): use another workdir"
                )
            missing = sorted({STATE, META} - items)
            if missing:
                raise DamagedStep(f"{self.directory / missing[0]} is missing")
            handler = ocp.JsonCheckpointHandler()
            meta = handler.restore(self.directory / META, args=ocp.args.JsonRestore())
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
            if _is_passing(error):
                raise
            raise DamagedStep(f"{self.directory / META}: {_line(error)}") from error
        self._check(meta)
        return meta

    def _check(self, meta: Any) -> None:
        if not isinstance(meta, dict) or meta.keys().isdisjoint({LEAVES, CHECKSUM}):
            raise ValueError(
                f"{self} was not saved by this trainer (no {CHECKSUM!r} in its meta "
                "data): use another workdir"
            )
        rest = {name: value for name, value in meta.items() if name != CHECKSUM}
        if _checksum(rest) != meta.get(CHECKSUM) or rest.get("step") != self.step:
            raise DamagedStep(f"{self.directory / META} is not as it was written")

    def _read_arrays(self, abstract: Any) -> Any:
        handler = ocp.PyTreeCheckpointHandler()
        arguments = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=True,
        )
        # Not by a manager, which waits for all processes: one may fail alone.
        try:
            state = handler.restore(self.directory / STATE, args=arguments)
        # A damaged file makes its readers raise whatever they like.
        except Exception as error:
            if _is_passing(error):
                raise
            raise DamagedStep(f"{self.directory / STATE}: {_line(error)}") from error
        # Orbax gives back what was asked for where its own list of arrays has a gap.
        gaps = [n for n, x in leaves(state).items() if not isinstance(x, jax.Array)]
        if gaps:
            raise DamagedStep(f"{self.directory / STATE}: {gaps[0]} is missing")
        return state


def _is_passing(error: Exception) -> bool:
    """Whether it may be gone at the next attempt: no sign of damage."""
    if isinstance(error, PASSING):
        return True
    return any(status in str(error) for status in PASSING_STATUS)


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path; a NamedTuple has those of the dict it is saved as."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def briefs(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Type and shape of every array."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()}


def saved_briefs(meta: Mapping[str, Any]) -> dict[str, str]:
    """Type and shape of every array that a step holds."""
    return {name: leaf["array"] for name, leaf in meta[LEAVES].items()}


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


def _checksum(meta: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _line(error: Exception) -> str:
    """The error in one line of a length that can be read."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
