"""The config of a program's command line, as `train.py` takes it."""

from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags


def read_config(arguments: Sequence[str]) -> ml_collections.ConfigDict:
    """The config of `--config=FILE --config.field=value ...`.

    Raises:
      ValueError: no or no such file, an unknown field, or a value of the wrong type.
    """
    values = flags.FlagValues()
    command = ["program", *arguments]
    flag = config_flags.DEFINE_config_file(
        "config", lock_config=True, flag_values=values, sys_argv=command
    )
    try:
        rest = values(command)[1:]
        config = flag.value
        if config is not None:
            config.lock()  # raises what reading the file raised
    except (AttributeError, KeyError) as error:
        raise ValueError(f"the config has no such field: {error.args[0]}") from error
    except (flags.Error, OSError, TypeError) as error:
        raise ValueError(str(error)) from error
    if rest:
        raise ValueError(f"unknown arguments {rest}: see --help and configs/base.py")
    if config is None:
        raise ValueError("no --config=configs/NAME.py was given")
    return config
