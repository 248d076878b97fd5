"""Renders chat templates in a process of its own, whose limits the kernel keeps.

A template is a program that came with a model, and no sandbox within Python bounds its
CPU seconds and memory: a single call can take either. So this file is also the program
of that process, which answers lines of JSON. One process renders all templates; it is
begun again after a template has ended it.

Where a template reads turn after turn, its rendering also says where in the text it
went on to each. What it wrote before depends on the turns before alone, so that one
rendering holds those of all shorter conversations.
"""

import atexit
import contextlib
import functools
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from resource import RLIMIT_AS, RLIMIT_CPU
from typing import Any, NamedTuple, NoReturn

import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

CPU_SECONDS = 3
MEMORY = 1 << 30
MOST_LETTERS = 1 << 24
"""Limits of a rendering: CPU seconds, bytes of the process, letters of the text."""
BYTES_A_SECOND = 1 << 20
MEMORY_A_BYTE = 64
LETTERS_A_BYTE = 4
"""How the limits grow with the bytes of a conversation."""
OF_LOOPS = {"first", "index", "index0", "previtem"}
"""Attributes of a loop that depend on no later turn."""
REMEDY = "choose another template"


class Rendering(NamedTuple):
    """A text, and where in it the template went on to turns 1, 2, ..., and to the end.

    ends: int (turns,); None: the template reads turns otherwise, as from the last.
    """

    text: str
    ends: Sequence[int] | None


class Renderer:
    """The process, which begins with the first rendering and ends with this one.

    count: renderings until now.
    """

    def __init__(self) -> None:
        self.count = 0
        self.forget()

    def forget(self) -> None:
        """Leaves the process to that which this one was forked from."""
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def render(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> Rendering:
        """Renders a template.

        options: what it may read besides the messages.

        Raises:
          ValueError: it is not Jinja, fails or passes a limit. Says so of "it".
        """
        size = len(json.dumps([messages, options.get("tools")]))
        seconds = CPU_SECONDS + size // BYTES_A_SECOND
        request = {
            "source": source,
            "messages": messages,
            "options": options,
            "seconds": seconds,
            "memory": MEMORY + size * MEMORY_A_BYTE,
            "letters": MOST_LETTERS + size * LETTERS_A_BYTE,
        }
        self.count += 1
        answer = self._answer(json.dumps(request))
        if "error" in answer:
            raise ValueError(answer["error"])
        if answer.get("code") == -signal.SIGXCPU:
            error = (
                f"takes more than {seconds} CPU seconds for a conversation: {REMEDY}"
            )
            raise ValueError(error)
        if "code" in answer:
            raise ValueError(f"ended its process ({answer['code']}): {REMEDY}")
        return Rendering(**answer)

    def _answer(self, request: str) -> dict[str, Any]:
        """Returns the answer, or the exit "code" of a process that gave none."""
        with self._lock:
            if self._process is None:
                self._process = _begin()
            process = self._process
            assert process.stdin and process.stdout
            line = b""
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(f"{request}\n".encode())
                    process.stdin.flush()
                line = process.stdout.readline()
            finally:
                # An answer that is not waited for would be taken for the next one.
                if not line.endswith(b"\n"):
                    self.close()
            return json.loads(line) if self._process else {"code": process.returncode}

    def close(self) -> None:
        """Ends the process, if there is one."""
        process = self._process
        self._process = None
        if process:
            assert process.stdin and process.stdout
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()
            process.wait()


RENDERER = Renderer()
atexit.register(RENDERER.close)
os.register_at_fork(after_in_child=RENDERER.forget)


def _begin() -> subprocess.Popen:
    """Starts the process, in a group of its own, which Ctrl-C does not reach."""
    return subprocess.Popen(
        [sys.executable, "-P", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


class LookAhead(BaseException):
    """A template reads turns otherwise than one after the other.

    It is no Exception, which tests of Jinja would take for an answer.
    """


@dataclass
class _Progress:
    """How far a rendering is.

    written: letters by now. ends: of these, where the template went on to each turn.
    reader: the iterator that did.
    """

    written: int = 0
    ends: list[int] = field(default_factory=list)
    reader: object = None


class _Turns:
    """The messages from a first one on, as a template reads them.

    Only one reader may come to turns that were not read before: what others find out of
    these stands earlier in the text.

    progress: shared by all slices.
    """

    __hash__ = None

    def __init__(self, messages: Sequence[Any], progress: _Progress, begin: int = 0):
        self._messages = messages
        self._progress = progress
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        reader = object()
        progress = self._progress
        for number in range(self._begin, len(self._messages) + 1):
            is_next = number == len(progress.ends) + 1
            if is_next and progress.reader in (None, reader):
                progress.reader = reader
                progress.ends.append(progress.written)
            else:
                self._check(number)
            yield from self._messages[number : number + 1]

    def __getitem__(self, key: Any) -> Any:
        if key == slice(1, None) and not self._begin:
            return _Turns(self._messages, self._progress, 1)
        if type(key) is not int or key < 0:
            raise LookAhead
        self._check(self._begin + key)
        return self._messages[self._begin + key]

    def _check(self, number: int) -> None:
        """Checks that a turn was read before, and the end was not."""
        read = len(self._progress.ends)
        if number > read or read == len(self._messages):
            raise LookAhead

    def __bool__(self) -> bool:
        return not self._begin or self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        raise LookAhead

    __eq__ = __len__ = __repr__ = _refuse


def _is_in_order(tree: nodes.Template, options: Mapping[str, Any]) -> bool:
    """Returns whether a template has one loop over turns, and behind it reads none."""
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if len(loops) != 1 or loops[0].else_:
        return False
    turns = {"messages", _sliced(loops[0].iter)}
    behind = nodes.Template(tree.body[tree.body.index(loops[0]) + 1 :])
    # Names that are read behind the loop may hold nothing that a turn decides.
    constants = {name.name for name in behind.find_all(nodes.Name)}
    for assigned in tree.find_all(nodes.Assign):
        name = _sliced(assigned.target)
        if name in turns and _sliced(assigned.node) not in turns:
            return False
        if name in constants and not isinstance(assigned.node, nodes.Const):
            return False
    # Nor may the loop be asked for more than an attribute of these.
    uses = [name.name for name in tree.find_all(nodes.Name)].count("loop")
    for attribute in tree.find_all(nodes.Getattr):
        uses -= attribute.attr in OF_LOOPS and _sliced(attribute.node) == "loop"
    return None not in turns and constants <= {*options} and not uses


def _sliced(node: nodes.Node) -> str | None:
    """Returns the name of a variable, or of one that a slice is taken of."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node = node.node
    return node.name if isinstance(node, nodes.Name) else None


class _Generation(jinja2.ext.Extension):
    """Reads {% generation %}, which some templates put around replies, as its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Returns what published templates are written for."""

    def fail(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = to_json
    functions: dict[str, Any] = environment.globals
    functions["raise_exception"] = fail
    functions["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@functools.lru_cache(maxsize=16)
def _open(source: str) -> tuple[jinja2.Template, nodes.Template]:
    tree = _environment().parse(source)
    return _environment().from_string(source), tree


def _write(
    template: jinja2.Template, turns: Any, progress: _Progress, request: Any
) -> str:
    """Returns the text of a rendering; stops where it is longer than it may be."""
    pieces = []
    for piece in template.generate(messages=turns, **request["options"]):
        pieces.append(piece)
        progress.written += len(piece)
        if progress.written > request["letters"]:
            raise ValueError(f"it writes more than {request['letters']:,} letters")
    return "".join(pieces)


def _rendered(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answers a request."""
    try:
        template, tree = _open(request["source"])
    except Exception as error:  # also of Python, which it is compiled to
        return {"error": f"is not Jinja: {_line(error)}; {REMEDY}"}
    messages = request["messages"]
    if _is_in_order(tree, request["options"]):
        progress = _Progress()
        with contextlib.suppress(Exception, LookAhead):
            text = _write(template, _Turns(messages, progress), progress, request)
            if len(progress.ends) == len(messages):
                return {"text": text, "ends": progress.ends}
    try:
        return {"text": _write(template, messages, _Progress(), request), "ends": None}
    except MemoryError:
        most = f"{request['memory']:,} bytes of memory"
        return {"error": f"takes more than {most} for a conversation: {REMEDY}"}
    except Exception as error:  # of any kind: it is a program
        return {"error": f"refuses the conversation: {_line(error)}"}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _serve() -> None:
    """Answers each line of the input until it ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = {kind: resource.getrlimit(kind) for kind in (RLIMIT_AS, RLIMIT_CPU)}
    for line in sys.stdin:
        request = json.loads(line)
        seconds = math.ceil(time.process_time()) + request["seconds"]
        for kind, most in (RLIMIT_AS, request["memory"]), (RLIMIT_CPU, seconds):
            with contextlib.suppress(ValueError):  # less is given; none on macOS
                resource.setrlimit(kind, (most, given[kind][1]))
        answer = _rendered(request)
        for kind, limits in given.items():
            resource.setrlimit(kind, limits)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
