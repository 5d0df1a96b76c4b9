"""What a measurement was made on: names and versions for the JSON, clocks, and whether two files may be compared."""

from __future__ import annotations

import subprocess
from typing import Any

SECTION = "flashattn"
"""The key of pytest-benchmark's machine_info under which all of this stands."""
SAME = ("device", "driver")
"""What must be the same in both files: another GPU or driver is another measurement."""
SLOWDOWNS = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by the driver",
    0x40: "thermal slowdown by the hardware",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that are not everyday: a GPU at work is at its power cap (0x4) as a rule."""


def describe(device: str) -> dict[str, Any]:
    """The machine_info of a run on `device` ("auto", "cpu", "cuda", "cuda:N"); imports torch."""
    import torch

    from ..capability import probe
    from ..report.json_report import versions

    found = probe(device)
    own: dict[str, Any] = {"device": found.name, "kind": found.kind, "versions": versions(), "driver": None}
    if found.kind == "cuda":
        index = int(device.partition(":")[2] or torch.cuda.current_device())
        said = ask(index, "driver_version", "power.limit", "clocks.max.sm")
        own |= {"driver": said.pop("driver_version", None), "limits": said}
        own |= {"capability": list(found.capability or ()), "cuda": torch.version.cuda}
        own |= {"cudnn": torch.backends.cudnn.version()}
    return own


def under_load(index: int) -> tuple[int | None, list[str]]:
    """The SM clock in MHz right after work, and what slows it; None and [] where nobody says."""
    said = ask(index, "clocks.sm", "clocks_event_reasons.active")
    clock = said.get("clocks.sm", "")
    return int(clock) if clock.isdigit() else None, slowdowns(said.get("clocks_event_reasons.active", ""))


def slowdowns(mask: str) -> list[str]:
    """The names of the SLOWDOWNS in a mask such as "0x0000000000000044"."""
    try:
        bits = int(mask, 16)
    except ValueError:
        return []
    return [name for bit, name in SLOWDOWNS.items() if bits & bit]


def ask(index: int, *fields: str) -> dict[str, str]:
    """What nvidia-smi says of torch's CUDA device `index`, by field; empty where there is no tool or no such field."""
    import torch

    # By its UUID, for CUDA_VISIBLE_DEVICES may have renumbered the devices.
    which = f"--id=GPU-{torch.cuda.get_device_properties(index).uuid}"
    command = ["nvidia-smi", which, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in line.split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Why two machine_info sections must not be compared, each as a clause; empty when they may."""
    return [f"{name} {old.get(name)!r} against {new.get(name)!r}" for name in SAME if old.get(name) != new.get(name)]
