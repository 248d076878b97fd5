"""Starts and ends programs: arguments, config and devices, errors in one line.

What `train.py` and the tools share. A program is a function `main(arguments)` under
`@as_program`, and gives its exit code to `sys.exit`.
"""

import argparse
import contextlib
import difflib
import functools
import itertools
import math
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TextIO, cast

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from configs import agents
from data.remote import as_path
from data.text.reading.skipped import printable
from tasks import run_config
from tasks.config_errors import fields_by_name

Main = Callable[[Sequence[str] | None], int | None]


class Program(Protocol):
    """Runs on arguments, or those of the process; returns the exit code."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int: ...


REFUSED = ValueError, OSError, ImportError, NotImplementedError, FloatingPointError
"""Errors that say what is wrong by themselves; others are shown with their trace."""

NO_DEVICES = "Unable to initialize backend "
"""Beginning of JAX's error where a platform cannot be used."""

NO_MEMORY = "RESOURCE_EXHAUSTED"

# Of accelerators: files, and what an environment has where JAX itself is to look.
NVIDIA_GPUS = "dev/nvidia0", "dev/nvidiactl"
TPUS = ("dev/accel[0-9]*",)
OTHERS = "dev/vfio/[0-9]*", "dev/dxg", "dev/kfd"
OTHERS_IN_ENVIRONMENT = (
    "TPU_NAME",
    "TPU_WORKER_ID",
    "JAX_FORCE_TPU_INIT",
    "PJRT_NAMES_AND_LIBRARY_PATHS",
)


def as_program(main: Main) -> Program:
    """Wraps `main(arguments)`: ends with one line and status 1 where it cannot go on.

    Before it begins it is settled where JAX looks for devices (see `platforms`), unless
    JAX_PLATFORMS says so.
    """

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:  # see train.py
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not jax.config.jax_platforms:
            jax.config.update("jax_platforms", platforms(Path("/"), os.environ))
        try:
            return main(arguments) or 0
        except REFUSED as error:
            return _end(error)
        except RuntimeError as error:
            if NO_MEMORY in str(error):
                say(str(error), sys.stderr)
                return _end(
                    "a device's memory is too small (see above): what to change, and "
                    "in which order, is in docs/when_it_goes_wrong.md"
                )
            if not str(error).startswith(NO_DEVICES):
                raise
            reason = str(error).removeprefix(NO_DEVICES).split(" (set JAX_")[0]
            return _end(
                f"JAX cannot use the devices of this host: {reason}; install what they "
                "need (make venv ACCELERATOR=gpu or tpu), or set JAX_PLATFORMS=cpu to "
                "run on its CPUs"
            )
        except KeyboardInterrupt:
            return _end("interrupted", 130)
        finally:
            _flush()

    return run


def say(line: str, file: TextIO | None = None) -> None:
    """Prints a line to stdout, or a file; a full disk or closed pipe ends no program.

    Escape codes, as of a file's name, are written as Python writes them.
    """
    line = "\n".join(map(printable, line.split("\n")))
    # Flushed: what ends a run that hangs does not empty buffers.
    with contextlib.suppress(OSError):
        print(line, file=file, flush=True)


def _end(error: object, status: int = 1) -> int:
    say(f"error: {' '.join(str(error).split())}", sys.stderr)
    return status


def _flush() -> None:
    """Lets what no stream takes go: Python would end with 120 for it."""
    for stream in sys.stdout, sys.stderr:
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), stream.fileno())


def platforms(root: Path, environment: Mapping[str, str]) -> str | None:
    """Returns the platforms for a program on this host, the best one first.

    The compilers of chips that are not there (`make venv-dev`) fail with many lines
    where JAX asks them for devices; a chip that is there and cannot be used is an
    error, and no reason to compute on CPUs.

    Args:
      root: root of the host's files, which show its devices.
      environment: its variables.

    Returns:
      JAX's names; or None, for whatever JAX finds.
    """

    def has(patterns: Sequence[str]) -> bool:
        return any(any(root.glob(pattern)) for pattern in patterns)

    is_hidden = environment.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if has(NVIDIA_GPUS) and not is_hidden:
        return "cuda,cpu"
    if has(TPUS):
        return "tpu,cpu"
    is_other = has(OTHERS) or not environment.keys().isdisjoint(OTHERS_IN_ENVIRONMENT)
    return None if is_other else "cpu"


OF_AGENTS = "give one that starts from configs/agents.py, as configs/exorl_tiny.py does"

CONFIG_FLAGS = """config:
  --config=FILE[:NAME]   program that makes the config, as configs/tiny.py
  --workdir=DIR          or the run in this directory, with the config that it keeps
  --config.NAME=VALUE    changes a field of configs/base.py, as --config.mesh.ring=4,
                         or, of an agent, of configs/agents.py
"""
"""End of the help of a program that calls `read_config`."""
OF_CONFIG = "--config", "--workdir"
"""Flags that `read_config` reads, and, of the first, its fields (`--config.NAME`)."""


class Parser(argparse.ArgumentParser):
    """Arguments of a program, whose description is its help; errors are one line.

    Names of arguments are not to be shortened: what is no argument of the program may
    be one of its config. Arguments that are paths are those of `as_path`.
    """

    def __init__(self, description: str | None = None, **options: Any):
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )
        self.register("type", Path, as_path)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses what it knows; the rest may be of a config, and nothing else.

        Raises:
          ValueError: a flag is neither; the message has the nearest one.
        """
        # Before argparse misses a required flag that is misspelt.
        if self._subparsers is None:  # whose own parsers know the flags
            self._check_flags(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def _check_flags(self, arguments: Sequence[str]) -> None:
        known = [*self._option_string_actions]
        if self.epilog == CONFIG_FLAGS:
            known += OF_CONFIG
        for argument in itertools.takewhile(lambda x: x != "--", arguments):
            flag = argument.split("=")[0]
            is_value = not flag.startswith("--") or " " in flag
            if is_value or flag in known or flag.split(".")[0] in OF_CONFIG:
                continue
            self.error(f"there is no flag {flag}{did_you_mean(flag, known)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(str(value), map(str, action.choices or ()))
            raise

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: see --help")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question that ends an error, with the nearest known word; or ""."""
    nearest = difflib.get_close_matches(word, list(known), n=1)
    return f". Did you mean {nearest[0]}?" if nearest else ""


def at_least(
    smallest: float, kind: type = int, most: float = math.inf
) -> Callable[[str], float]:
    """Returns an argument type: a number that is not smaller, and not above the most.

    kind: int or float.
    """

    def number(text: str) -> float:
        value = math.nan
        given = repr(text)
        with contextlib.suppress(ValueError):
            value = kind(text)
            given = text
        if not smallest <= value <= most:
            wanted = f"a{' whole' * (kind is int)} number of at least {smallest}"
            wanted += f" and at most {most}" * (most < math.inf)
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {given}")
        return value

    return number


share = at_least(0, float, most=1)
"""Parses an argument that is a number from 0 to 1."""


def read_config(arguments: Sequence[str]) -> ConfigDict:
    """Reads the config of `--config=FILE --config.field=value ...`.

    FILE is a program, which makes the config; `FILE:NAME` passes it a name. Or of
    `--workdir=DIR --config.field=value ...`: the config of the run there.

    Raises:
      ValueError: no or no such file, one that makes no config, an unknown field, or a
        value of the wrong type.
      FileNotFoundError: the run is missing.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--config")
    parser.add_argument("--workdir")
    chosen, overrides = parser.parse_known_args(arguments)
    if chosen.config and chosen.workdir:
        raise ValueError(
            f"--config={chosen.config} and --workdir={chosen.workdir} were given: give "
            "one of them; --config.workdir=DIR puts the run of a --config elsewhere"
        )
    if chosen.workdir:
        config = run_config.read(chosen.workdir)
    elif chosen.config:
        file, _, name = chosen.config.partition(":")
        config = _made_by(file, name if ":" in chosen.config else None)
    else:
        raise ValueError(
            "no --config=configs/NAME.py was given, nor --workdir=DIR of a run"
        )
    for override in overrides:
        if override.startswith("--config."):
            _check_field(config, override.removeprefix("--config.").split("=", 1)[0])
    values = flags.FlagValues()
    command = ["program", *overrides]
    try:
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, sys_argv=command
        )
        rest = values(command)[1:]
    except (flags.Error, AttributeError, KeyError, TypeError) as error:
        raise ValueError(str(error)) from error
    if rest:
        raise ValueError(f"unknown arguments {rest}: see --help and configs/base.py")
    config = cast(ConfigDict, values["config"].value)
    if config.task == "exorl" and "agent" not in config:
        raise ValueError(
            f"{config.task=} is of agents, and this config is of text: {OF_AGENTS}"
        )
    return config


def _made_by(file: str, name: str | None) -> ConfigDict:
    """Returns what the file's `get_config` returns, given a name if there is one."""
    if not Path(file).is_file():
        # By the names alone: the folder that all share would make any of them near.
        stems = [path.stem for path in Path("configs").glob("*.py")]
        nearest = difflib.get_close_matches(Path(file).stem, stems, n=1)
        near = "".join(f". Did you mean configs/{stem}.py?" for stem in nearest)
        raise ValueError(f"there is no config {file}: give one of configs/*.py{near}")
    try:
        get_config = runpy.run_path(file)["get_config"]
        config = get_config() if name is None else get_config(name)
    except Exception as error:
        what = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        named = file if name is None else f"{file}:{name}"
        raise ValueError(f"{named}: {what}{error}") from error
    if not isinstance(config, ConfigDict):
        raise ValueError(f"{file}: get_config returns {config!r}, which is no config")
    return config


def _check_field(config: ConfigDict, name: str) -> None:
    """Raises ValueError if the config has no field of that dotted name."""
    section: Any = config
    for part in name.split("."):
        known = section if isinstance(section, ConfigDict) else {}
        if part in known:
            section = known[part]
        elif name in fields_by_name(agents.get_config()):
            raise ValueError(
                f"config.{name} is of agents, and this config is of text: {OF_AGENTS}"
            )
        else:
            fields = fields_by_name(config)
            elsewhere = [n for n in fields if n.endswith(f".{part}")]
            near = elsewhere or difflib.get_close_matches(part, known, n=1)
            meant = f'Did you mean "{near[0]}"?' if near else "See configs/base.py"
            raise ValueError(f'config.{name}: there is no field "{part}". {meant}')
