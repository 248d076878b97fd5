"""The order of issue in a Hopper kernel's machine code (SASS)."""

import importlib.util
import itertools
import re
from pathlib import Path

LINE = re.compile(r"^(\.L_x_\d+):|/\*[0-9a-f]{4,}\*/ +([^;]*);", re.MULTILINE)
"""A label or an instruction, as nvdisasm prints them."""


def cuda_root() -> str:
    """Returns the folder whose bin/ holds nvdisasm: of Triton, for Mosaic to run."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin is not None
    return str(Path(triton.origin).parent / "backends" / "nvidia")


def read_pipeline(sass: str) -> tuple[str, ...]:
    """Reads a kernel's one loop with WGMMAs, in the order of issue.

    Returns:
      Products as "8 SS 64x128x16", whose first operand is in SMEM (SS) or registers
      (RS); "wait 1" until one group of them is in flight; "66 exp2" of a thread.

    Raises:
      ValueError: there is not one such loop.
    """
    labels, code = {}, []
    for label, instruction in LINE.findall(sass):
        if label:
            labels[label] = len(code)
        else:
            code.append(instruction)
    loops = []
    for i, instruction in enumerate(code):
        target = re.search(r"BRA .*`\((.*)\)", instruction)
        body = code[labels[target[1]] : i] if target else []
        # Waits for barriers go on, if they fail, behind the end of the kernel (EXIT).
        if "HGMMA" in " ".join(body) and not any("EXIT" in line for line in body):
            loops.append(body)
    if len(loops) != 1:
        raise ValueError(f"SASS must have one loop with WGMMAs, got {len(loops)}")
    events = filter(None, map(_event, loops[0]))
    return tuple(
        event if event.startswith("wait") else f"{len(list(group))} {event}"
        for event, group in itertools.groupby(events)
    )


def _event(instruction: str) -> str | None:
    if product := re.search(r"HGMMA\.(\w+)\S* R\d+, (R?)", instruction):
        return f"{'RS' if product[2] else 'SS'} {product[1]}"
    if wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", instruction):
        return f"wait {int(wait[1], 16)}"
    return "exp2" if "MUFU.EX2" in instruction else None
