"""Detection of the device that a program is compiled for."""

import re

import jax

from . import chips


def device_kind() -> str:
    """Returns its kind, as "TPU v4" or "NVIDIA H200".

    That of the mesh in use, if the mesh names its devices, else of this process's
    devices.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    return (described or jax.devices()[0]).device_kind


def is_tpu() -> bool:
    """Returns whether it is a TPU."""
    return device_kind().startswith("TPU")


def kernel_cores(kind: str | None = None) -> int:
    """Returns how many cores of a device share out the heads of a kernel.

    kind: of `device_kind`, which it is by default.
    """
    return 2 if (kind or device_kind()) in ("TPU v4", "TPU v5", "TPU v5p") else 1


def matrix_unit(kind: str) -> int:
    """Returns the side of a matrix unit of a TPU of this kind, as "TPU v5p"."""
    chip = chips.find(kind)
    # The table counts units of 128 x 128: 4 of a core, or 16 where they are wide.
    return 256 if chip and chip.matrix_units == 16 else 128


def rings_both_ways(kind: str | None = None) -> bool:
    """Returns whether rings of these devices go both ways round by themselves.

    Between TPUs, but for v3: its kibibyte of semaphores is too little for a step of a
    model whose ring sends twice the chunks at a time. kind: as of `kernel_cores`.
    """
    kind = kind or device_kind()
    return kind.startswith("TPU") and kind != "TPU v3"


def is_cpu() -> bool:
    """Returns whether it is a CPU."""
    return device_kind() == "cpu"


def is_hopper(kind: str) -> bool:
    """Returns whether it is an H100, H200, H20, GH200 …"""
    return re.match(r"NVIDIA G?H\d", kind) is not None


def is_blackwell(kind: str) -> bool:
    """Returns whether it is a B200, GB200, B300 …; workstations' chips differ."""
    return re.match(r"NVIDIA G?B\d{3}", kind) is not None
