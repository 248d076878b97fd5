"""One step on disk: its meta data, and whether what is read is what was saved.

A step directory holds two items: `state`, the train state's arrays, and `meta`, JSON
with the step, the fingerprint of the model that the arrays belong to, the record of the
run, type, shape and digest of each array, and a checksum of all of this. Orbax itself
gives back whatever a damaged file holds.
"""

import contextlib
import itertools
import json
import re
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from training.hosts.processes import all_agree
from training.saved.digest import digests, not_finite

STATE, META = "state", "meta"
FINGERPRINT, LEAVES, CHECKSUM = "fingerprint", "leaves", "crc32"
RECORD = "record"
"""Key of the run's record (see `training/saved/record.py`)."""
PARAMETERS = "params"
"""Name of the parameters in a saved train state."""

WAITS = (1.0, 4.0, 15.0)
"""Seconds before what could not be read is tried again."""

LISTED = 8
"""Arrays that do not fit a state, of which an error names the first."""

AnyPath = str | Path | epath.Path

# What shows that a step is damaged: a part that is not there, or was read and makes no
# sense to Python or to TensorStore. Any other error may be gone at the next attempt.
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
SENSELESS = AttributeError, EOFError, LookupError, RecursionError, TypeError, ValueError
SENSELESS_STATUS = ("DATA_LOSS", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE")


class DamagedStep(Exception):
    """A step on disk is not what was saved, or not finite; says where and what."""


class NotFinite(ValueError):
    """A state that must not be saved: an array holds nan or inf; says which."""


def make_meta(
    step: int, fingerprint: Mapping[str, Any], record: Mapping[str, Any], state: Any
) -> dict[str, int | dict]:
    """Returns the `meta` of a state that is about to be saved.

    Raises:
      NotFinite: the state must not be saved.
    """
    briefly = briefs(leaves(state))
    # Before the save begins, as the caller donates the arrays after it.
    digest_of = digests(state)
    if what := not_finite(digest_of):
        raise NotFinite(f"step {step} is not saved: {what}")
    saved_leaves = {}
    for name, brief in briefly.items():
        saved_leaves[name] = {"array": brief, "digest": digest_of[name].bits}
    meta = {
        "step": step,
        FINGERPRINT: dict(fingerprint),
        RECORD: dict(record),
        LEAVES: saved_leaves,
    }
    return meta | {CHECKSUM: _checksum(meta)}


@dataclass(frozen=True)
class StoredStep:
    """A step that was saved.

    step: number of updates made.
    directory: of its items; a path as `CheckpointManager.directory` gives it.
    sleep: waits for this many seconds.
    """

    step: int
    directory: epath.Path
    sleep: Callable[[float], None] = time.sleep

    def __str__(self) -> str:
        return f"step {self.step} in {self.directory.parent}"

    def meta(self) -> dict[str, Any]:
        """Reads the meta data; on all processes.

        Raises:
          ValueError: the step was not saved by this trainer.
          DamagedStep: it was, but on some process this is missing, or is not as it was
            written.
          OSError: it could not be read, several times.
        """
        return together(self, self._read_meta, self.sleep)

    def check_leaves(self, meta: Mapping[str, Any], abstract_state: Any) -> None:
        """Compares names, shapes and dtypes; Orbax would cast a dtype in silence."""
        wanted = leaves(abstract_state)
        saved = saved_briefs(meta)
        differing = differences(saved, briefs(wanted))
        if differing and all(name.startswith(f"{PARAMETERS}.") for name in saved):
            raise ValueError(
                f"{self} holds imported weights and not a run: name them in "
                "config.init_from (adapters: export them merged, and import that), and "
                "choose another workdir"
            )
        if differing:
            first = dict(itertools.islice(differing.items(), LISTED))
            unlisted = len(differing) - len(first)
            rest = f"\n  and {unlisted} more" if unlisted else ""
            raise ValueError(
                f"{self} does not fit the train state; use another workdir, where "
                "config.init_from may take its parameters, or the model and optimizer "
                f"it was saved with:\n  {listed(first)}{rest}"
            )

    def read(self, abstract: Any, meta: Mapping[str, Any]) -> Any:
        """Reads arrays onto the shardings of `abstract`; on all processes.

        Args:
          abstract: `jax.ShapeDtypeStruct` with a sharding at each leaf; the whole
            state, or a part of its tree. `meta` has to hold all of them.
          meta: of this step.

        Raises:
          DamagedStep: on some process an array is missing, or it has other bits than
            the one that was saved, or holds nan or inf.
          OSError: it could not be read, several times.
        """
        state = together(self, lambda: self._read_arrays(abstract), self.sleep)
        # Orbax and TensorStore return whatever bits a file holds: nothing else notices.
        # On all processes alike, as digests are sums over all devices.
        read = digests(state)
        saved = meta[LEAVES]
        wrong = [name for name in read if saved[name]["digest"] != read[name].bits]
        if wrong:
            raise DamagedStep(
                f"{self.directory / STATE}: {wrong[0]} has other bits than when it was "
                f"saved (and {len(wrong) - 1} more arrays)"
            )
        if what := not_finite(read):
            raise DamagedStep(f"{self.directory / STATE}: {what}, and was saved so")
        return state

    @contextlib.contextmanager
    def _reading(self, item: str) -> Iterator[None]:
        """Turns a reader's errors to DamagedStep if they show damage, else OSError."""
        try:
            yield
        # Readers raise whatever they like.
        except Exception as error:
            kind = DamagedStep if shows_damage(error) else OSError
            raise kind(f"{self.directory / item}: {_line(_root(error))}") from error

    def _read_meta(self) -> dict[str, Any]:
        with self._reading(META):
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
        with self._reading(META):
            meta = handler.restore(self.directory / META, args=ocp.args.JsonRestore())
        self._check(meta)
        return dict(meta)

    def _check(self, meta: Any) -> None:
        # Before any of it is used: a digit that changed is another step, or model.
        if not isinstance(meta, dict) or meta.keys().isdisjoint({LEAVES, CHECKSUM}):
            raise DamagedStep(
                f"{self.directory / META} has no {CHECKSUM!r}: it was replaced, or not "
                "saved by this trainer"
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
        with self._reading(STATE):
            state = handler.restore(self.directory / STATE, args=arguments)
        # Orbax gives back what was asked for where its own list of arrays has a gap.
        gaps = [n for n, x in leaves(state).items() if not isinstance(x, jax.Array)]
        if gaps:
            raise DamagedStep(f"{self.directory / STATE}: {gaps[0]} is missing")
        return state


def together[T](what: object, read: Callable[[], T], sleep: Callable) -> T:
    """Returns `read()`, or raises on every process the kind of error that one has.

    OSError comes last: the read is tried again after each of WAITS.

    what: is read, for errors. sleep: waits for this many seconds.
    """
    results: list[T] = []
    error: Exception | None = None
    for wait in (*WAITS, None):
        if not results:  # once read it is not read again, while others still try
            try:
                results.append(read())
                error = None
            except (DamagedStep, ValueError, OSError) as raised:
                error = raised
        # Collective: every process makes these calls in this order, whatever it has
        # read. One that left the loop by its own error would hang all others.
        if all_agree(error is None):
            return results[0]
        for kind in (DamagedStep, ValueError):
            if not all_agree(not isinstance(error, kind)):
                if isinstance(error, kind):
                    raise error
                raise kind(f"{what}: so says another process")
        if wait is not None:
            sleep(wait)
    raise OSError(
        f"{what} cannot be read ({1 + len(WAITS)} attempts), which is not a sign "
        "of damage; nothing was changed. Run the same command again when it can be: "
        f"{error or 'so says another process'}"
    ) from error


def shows_damage(error: BaseException) -> bool:
    """Returns whether an error is due to the disk's contents, not to reading."""
    error = _root(error)
    text = str(error)
    if code := re.search(r"os_error_code='(\d+)'", text):
        error = OSError(int(code[1]), text)  # makes an error of the class of its code
    if isinstance(error, OSError):
        return isinstance(error, ABSENT)
    # TensorStore raises ValueError with a status in front, but for one: bad content.
    if status := re.match("([A-Z]+(?:_[A-Z]+)*): ", text):
        return status[1] in SENSELESS_STATUS
    return isinstance(error, SENSELESS)


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def leaves(tree: Any) -> dict[str, Any]:
    """Returns leaves by dotted path; a NamedTuple's as of the dict it is saved as."""
    by_name = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        by_name[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return by_name


def briefs(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Lists type and shape of every array."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()}


def saved_briefs(meta: Mapping[str, Any]) -> dict[str, str]:
    """Lists type and shape of every array that a step holds."""
    return {name: leaf["array"] for name, leaf in meta[LEAVES].items()}


def differences(
    saved: Mapping[str, Any], ours: Mapping[str, Any], may_differ: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Returns what differs: the saved value and ours, by key.

    may_differ: names of what is left out (see `is_named`).
    """
    differing = {}
    for key in sorted(saved.keys() | ours.keys()):
        theirs = saved.get(key, "nothing")
        own = ours.get(key, "nothing")
        if theirs != own and not is_named(key, may_differ):
            differing[key] = theirs, own
    return differing


def listed(differing: Mapping[str, tuple[Any, Any]], between: str = "\n  ") -> str:
    """Lists the differences, in words."""
    lines = []
    for key, (theirs, own) in differing.items():
        lines.append(f"{key}: saved {theirs}, this run {own}")
    return between.join(lines)


def is_named(key: str, names: Collection[str]) -> bool:
    """Returns whether a dotted key, a part of it, or its parent is one of the names."""
    parts = {*key.split("."), key}
    return any(name in parts or key.startswith(f"{name}.") for name in names)


def absolute(directory: AnyPath) -> AnyPath:
    """Returns the absolute path that Orbax needs; a bucket already is."""
    return directory if "://" in str(directory) else Path(directory).absolute()


def _checksum(meta: Mapping[str, Any]) -> int:
    # Sorted: keys may be read back in another order.
    return zlib.crc32(json.dumps(meta, sort_keys=True).encode())


def _line(error: BaseException) -> str:
    """Formats the error in one line of readable length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
