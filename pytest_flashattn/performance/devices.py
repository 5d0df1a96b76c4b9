"""What a device can do at most: reads devices.toml. Torch-free."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources

from ..cases import Case


@dataclass(frozen=True)
class Peak:
    """tflops: dense 16-bit tensor cores, TFLOP/s; gbps: memory, GB/s; source: who says so."""

    name: str
    tflops: float
    gbps: float
    source: str


def peak(name: str) -> Peak | None:
    """The peak of the device that torch calls `name`; None for one that is not in the table."""
    return _table().get(name)


def share(case: Case, name: str, tflops: float) -> float | None:
    """`tflops` as a share of the device's peak in the case's dtype; None where the table does not say (float32 too)."""
    found = peak(name)
    return tflops / found.tflops if found is not None and case.dtype != "fp32" else None


@functools.lru_cache(maxsize=1)
def _table() -> dict[str, Peak]:
    text = resources.files(__package__).joinpath("devices.toml").read_text(encoding="utf-8")
    return {row["name"]: Peak(**row) for row in tomllib.loads(text)["device"]}
