"""Where the points of a run go: TensorBoard, JSON lines, Weights & Biases."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from tensorboard.backend.event_processing import io_wrapper
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from training.saved.workdir import is_bucket, path_of, replace_text

FLUSH_SECONDS = 15
"""On a bucket points arrive this often; a killed run loses no more."""

FILE = "metrics.jsonl"
"""JSON lines of a run, beside its checkpoints."""

NAMES = "tensorboard", "wandb"
"""Sinks that a config can name; JSON lines are always written."""


class Sink:
    """Takes the points of a run; this one gives them to others, or drops them.

    No run ends because points cannot be written, as on a full disk.
    """

    _say: Callable[[str], None] = print
    _fails = False
    _errors: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, *sinks: "Sink"):
        self._sinks = sinks

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one point of every tag."""
        for sink in self._sinks:
            sink.scalars(step, values)

    def flush(self) -> None:
        """Returns when every point so far is written."""
        for sink in self._sinks:
            sink.flush()

    def close(self) -> None:
        """Flushes, and closes what is open."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try(self, write: Callable[[], None], what: str) -> bool:
        """Writes; logs the first failure in a row. Returns whether it succeeded."""
        try:
            write()
            self._fails = False
        except self._errors as error:
            if not self._fails:
                self._say(f"WARNING: {what}: {error}")
            self._fails = True
        return not self._fails


class TensorBoardWriter(Sink):
    """Writes TensorBoard's own event files, without TensorFlow."""

    def __init__(
        self, directory: str | Path, first_step: int, say: Callable[[str], None] = print
    ) -> None:
        """Starts a new event file in `directory`.

        Args:
          directory: local path, or a bucket (`gs://...`, which needs gcsfs).
          first_step: first step that this run reports. What earlier runs left in the
            directory from that step on disappears from the curves, so that a resumed
            run draws no zig-zag.
          say: logs when points are lost.
        """
        self._directory = directory
        self._first_step = first_step
        self._say = say
        self._writer: EventFileWriter | None = self._open()
        # TensorBoard drops what earlier files have from this step on.
        start = SessionLog(status=SessionLog.START)
        self._add(first_step, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point to the curve of every tag; float32 is what is kept."""
        points = []
        for tag, value in values.items():
            points.append(Summary.Value(tag=tag, simple_value=float(value)))
        self._add(step, summary=Summary(value=points))

    def text(self, tag: str, text: str) -> None:
        """Adds a text, which TensorBoard renders as Markdown, at the first step."""
        self._add(self._first_step, summary=text_pb(tag, text))

    def flush(self) -> None:
        """Returns when every point so far is in the file: not even SIGKILL loses it."""
        self._call("flush")

    def close(self) -> None:
        self._call("close")

    def _add(self, step: int, **what: Any) -> None:
        self._call("add_event", Event(wall_time=time.time(), step=step, **what))

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls the writer, after a failure one of a new file."""

        def call() -> None:
            self._writer = self._writer or self._open()
            getattr(self._writer, name)(*arguments)

        if not self._try(call, f"points of {self._directory} are lost"):
            self._writer = None

    def _open(self) -> EventFileWriter:
        # By default every 120 s.
        return EventFileWriter(str(self._directory), flush_secs=FLUSH_SECONDS)


class JsonLines(Sink):
    """Writes a file of one JSON object a line: `step`, `time` and the points' tags.

    `time` is in seconds since 1970; a value that is not finite is null. At most
    `FLUSH_SECONDS` of points are lost where the file is in a bucket, else none.
    """

    def __init__(
        self,
        path: str | Path,
        first_step: int,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.time,
    ):
        """Opens the file, and takes out of it what this run will write again.

        Args:
          path: local, or in a bucket.
          first_step: first step that this run reports; what is there from that step on
            goes, as in the curves of `TensorBoardWriter`.
          say: logs when points cannot be written; they are kept until they can.
          clock: gives the times.

        Raises:
          OSError: the file cannot be read or written.
        """
        self._path = path_of(path)
        self._say = say
        self._clock = clock
        there = self._path.read_bytes() if self._path.exists() else b""
        kept = "".join(_before(there.decode(errors="replace"), first_step))
        if kept.encode() != there or not there:
            replace_text(self._path, kept)
        self._is_bucket = is_bucket(path)
        # An object in a bucket cannot grow: it is written whole.
        self._written = kept if self._is_bucket else ""
        self._size = len(kept.encode())
        self._new: list[str] = []
        self._flushed = clock()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        now = self._clock()
        # JSON has no nan: readers would refuse the whole line.
        points: dict[str, float | None] = {}
        for tag, value in values.items():
            points[tag] = float(value) if math.isfinite(value) else None
        self._new.append(json.dumps({"step": step, "time": now} | points) + "\n")
        if not self._is_bucket or now - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._new:
            self._try(self._write, f"{self._path} cannot be written now")
            self._flushed = self._clock()

    def close(self) -> None:
        self.flush()

    def _write(self) -> None:
        new = "".join(self._new)
        if self._is_bucket:
            replace_text(self._path, self._written + new)
            self._written += new
        else:
            with open(self._path, "ab") as file:
                if self._fails:  # behind it is a part of what failed
                    file.truncate(self._size)
                file.write(new.encode())
                self._size = file.tell()
        self._new = []


def _before(lines: str, first_step: int) -> Iterator[str]:
    """Yields the whole lines of steps before this one."""
    for line in lines.splitlines(keepends=True):
        try:
            is_before = json.loads(line)["step"] < first_step
        except (ValueError, LookupError, TypeError, RecursionError):  # cut off, damaged
            continue
        if line.endswith("\n") and is_before:
            yield line


class WandbSink(Sink):
    """Sends points to Weights & Biases, or keeps them for it (WANDB_MODE=offline)."""

    def __init__(
        self,
        workdir: str,
        run: str,
        config: Mapping[str, Any],
        say: Callable[[str], None] = print,
    ):
        """Begins a run there, or goes on with it.

        Project, entity and mode are those of W&B's own variables (WANDB_PROJECT, …).
        Steps that it has already, which a resumed run makes again, are not sent again.

        Args:
          workdir: of the run, whose name it gets; where it is local, W&B's files are
            there.
          run: name of the run, the same at each of its starts.
          config: shown beside the curves.
          say: logs when points are lost.

        Raises:
          ValueError: W&B cannot begin, as without a key.
        """
        import wandb

        self._errors = (OSError, wandb.Error)
        self._say = say
        try:
            self._run = wandb.init(
                id=run,
                name=Path(workdir).absolute().name or "run",
                dir=None if is_bucket(workdir) else workdir,
                config=dict(config),
                resume="allow",
                settings=wandb.Settings(console="off"),
            )
        except self._errors as error:
            raise _refusal(error) from error

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._run.step:
            return
        points = {tag: float(value) for tag, value in values.items()}
        self._try(lambda: self._run.log(points, step=step), "points of W&B are lost")

    def flush(self) -> None:
        """Returns at once: W&B writes in a process of its own."""

    def close(self) -> None:
        self._run.finish()


def check_wandb() -> None:
    """Checks that W&B can begin, before anything is compiled.

    Raises:
      ValueError: it has no key, or a wrong one, and is not to work offline.
    """
    import wandb

    try:
        wandb.login()
    except wandb.Error as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ValueError:
    return ValueError(
        f"W&B cannot begin: {error} Set WANDB_MODE=offline, which keeps the points "
        "for `wandb sync`, or take wandb out of config.metrics"
    )


def run_directory(directory: str, workdir: str) -> str:
    """Returns the folder of a run's curves, by whose name TensorBoard shows the run.

    It is named as the workdir; or, if there are curves already, it is the folder that
    they are in, as the workdir may have been moved since.

    directory: that TensorBoard is given.
    """
    there = list(io_wrapper.GetLogdirSubdirectories(directory))
    name = Path(workdir).absolute().name or "run"
    return there[0] if len(there) == 1 else f"{directory}/{name}"
