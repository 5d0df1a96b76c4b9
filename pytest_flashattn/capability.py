"""What the machine can do, and the markers that ask for it: sm80, sm90, sm100, fp8.

Judged in setup, never at collection, so that `--collect-only` works anywhere and all xdist workers collect alike.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest

NEEDS: dict[str, tuple[int, int]] = {"sm80": (8, 0), "sm90": (9, 0), "sm100": (10, 0), "fp8": (8, 9)}
"""Marker -> the least compute capability it needs (fp8 tensor cores came with 8.9)."""

MARKERS: dict[str, str] = {
    "sm80": "sm80(exact=False): needs compute capability 8.0 or more; exact=True: 8.x only",
    "sm90": "sm90(exact=False): needs compute capability 9.0 or more; exact=True: 9.x only (wgmma runs nowhere else)",
    "sm100": "sm100(exact=False): needs compute capability 10.0 or more; exact=True: 10.x only (tcgen05)",
    "fp8": "fp8: needs a device with float8 tensor cores (compute capability 8.9 or more)",
    "flashattn_cases": "flashattn_cases(name, matrix=None): run the test, which takes flashattn_case, on a bundled set "
    "of cases such as 'forward' or 'backward'; matrix: smoke, default or full instead of --flashattn-matrix",
}


@dataclass(frozen=True)
class Device:
    """The device of a run. capability: of a CUDA device; absence: why there is none, as the end of a sentence."""

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    absence: str = ""

    def __str__(self) -> str:
        return f"{self.name} (sm_{self.capability[0]}{self.capability[1]})" if self.capability else self.name

    def covers(self) -> tuple[str, ...]:
        """The words of hardware that something verified on this device proves."""
        return tuple(word for word, least in NEEDS.items() if self.capability and self.capability >= least)


@functools.cache
def probe(setting: str) -> Device:
    """The device that `--flashattn-device=setting` means. Imports torch and may create a CUDA context."""
    if setting == "cpu":
        return Device("cpu", "CPU", absence="--flashattn-device=cpu was asked for")
    try:
        import torch
    except ImportError:
        return Device("cpu", "CPU", absence="torch is not installed")
    if not torch.cuda.is_available():
        return Device("cpu", "CPU", absence="this machine has no CUDA device")
    index = int(setting.partition(":")[2] or torch.cuda.current_device())
    if index >= torch.cuda.device_count():
        return Device("cpu", "CPU", absence=f"this machine has no CUDA device {index}")
    return Device("cuda", torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))


def check_device(setting: str) -> None:
    """Raises UsageError when a CUDA device is asked for by name and this machine lacks it; creates no context."""
    if not setting.startswith("cuda"):
        return
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(setting.partition(":")[2] or 0) >= count:
        found = f"{count} CUDA devices, counted from 0" if count else "no CUDA device"
        raise pytest.UsageError(f"--flashattn-device={setting}: this machine has {found}")


def glance() -> str:
    """The GPUs' names for a header, from the driver's tool: an xdist controller must not create a CUDA context."""
    import subprocess

    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return "CPU"
    return ", ".join(sorted({name.strip() for name in names if name.strip()})) or "CPU"


def gap(item: pytest.Item, setting: str) -> str | None:
    """Why this machine cannot run the item, as a sentence; None if it can, or if no marker asks for anything."""
    for word in NEEDS:
        for marker in item.iter_markers(word):
            if reason := _lack(word, bool(marker.kwargs.get("exact", False)), probe(setting)):
                return reason
    return None


def lacks(word: str, setting: str) -> str | None:
    """Why the device of this setting has not what a marker asks for, as a sentence; None if it has."""
    return _lack(word, False, probe(setting))


def _lack(word: str, exact: bool, device: Device) -> str | None:
    major, minor = NEEDS[word]
    needed = f"{word} needs compute capability {major}.{'x' if exact else minor}"
    if device.capability is None:
        return f"{needed}; {device.absence}"
    have = ".".join(map(str, device.capability))
    if device.capability < (major, minor) or (exact and device.capability[0] != major):
        return f"{needed}; {device.name} has {have}"
    return None
