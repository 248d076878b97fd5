"""Prints the signatures of tokamax's kernels that are called: they are private.

`python -m tests.support.tokamax_signatures`, where tokamax is installed, fails if they
are not those in tests/cases/tokamax.txt.
"""

import importlib
import inspect
import sys
from collections.abc import Callable

from tests.cases import lines

ATTENTION = "tokamax._src.ops.attention.pallas_mosaic_gpu"
MODULES = {
    f"{kind}_{generation}": function
    for generation in ("sm90", "sm100")
    for kind, function in (
        ("kernel", "flash_attention_kernel"),
        ("vjp_kernel", "flash_attention_vjp_kernel"),
    )
}
"""Functions by the ends of their modules' names."""


def signature(function: Callable) -> str:
    """Returns the names of parameters, those by name alone behind an asterisk."""
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return " ".join(names)


def installed() -> list[str]:
    """Returns a line for each function and `Config` of the tokamax that is there."""
    found = []
    for module_name, function in MODULES.items():
        module = importlib.import_module(f"{ATTENTION}_{module_name}")
        for name in function, "Config":
            found.append(f"{module_name} {name}: {signature(getattr(module, name))}")
    return found


if __name__ == "__main__":
    print(*installed(), sep="\n")
    sys.exit(installed() != lines("tokamax.txt"))
