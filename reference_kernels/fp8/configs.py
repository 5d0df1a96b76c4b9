"""Tiles of the plain FP8 forward: a table by architecture and head dimension, read as ../configs.py reads its own.

A tile must not cross a border of the scales' blocks: BLOCK_M and BLOCK_N divide quantiser.BLOCK. Every tile has two
products of its own in flight, S and P V, beside the running sum: BLOCK_M x (BLOCK_N + 2 D) float32 in registers is what
bounds a row. Chosen by what compiles without spills; not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..configs import Config

_C = Config
TABLE: dict[int, dict[int, Config]] = {
    89: {64: _C(64, 64, 4, 3), 128: _C(64, 64, 8, 3), 256: _C(64, 32, 8, 2)},
    90: {64: _C(64, 128, 4, 3), 128: _C(64, 64, 4, 3), 256: _C(64, 64, 8, 3)},
    100: {64: _C(128, 128, 8, 3), 128: _C(128, 64, 8, 3), 256: _C(64, 64, 8, 3)},
    120: {64: _C(64, 64, 8, 3), 128: _C(64, 64, 8, 3), 256: _C(64, 32, 8, 2)},
}
OLDEST = min(TABLE)
"""The oldest compute capability with matrix products of FP8."""

INTERPRETER = _C(64, 32, 1, 1)


def lookup(capability: int, d: int) -> Config:
    """The row for a head dimension up to 256 on compute capability 10 * major + minor, at least OLDEST."""
    rows = TABLE[max(a for a in TABLE if a <= capability)]
    return rows[min(row for row in rows if row >= d)]


def config_for(x: torch.Tensor, d: int) -> Config:
    """The row for the device of x."""
    if triton.knobs.runtime.interpret:
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(x.device)
    return lookup(10 * major + minor, d)


@dataclass(frozen=True)
class QuantiserConfig:
    """elements: of a tile for each thread, which gives the warps. part: columns of a rotation's matrix product."""

    elements: int
    part: int = 64


QUANTISERS: dict[str, dict[int, QuantiserConfig]] = {
    "rows": {d: QuantiserConfig(64) for d in (64, 128, 256)},
    "columns": {d: QuantiserConfig(64) for d in (64, 128, 256)},
    "rotated": {64: QuantiserConfig(64), 128: QuantiserConfig(64), 256: QuantiserConfig(128)},
}
"""Of the quantiser, by what it does and head dimension; rotated columns are "rotated". Chosen by what compiles without
spills, for every architecture; not measured."""

MOST_WARPS = 16


def quantiser_config(d: int, *, rotated: bool, transposed: bool) -> QuantiserConfig:
    """The row for a head dimension up to 256."""
    rows = QUANTISERS["rotated" if rotated else "columns" if transposed else "rows"]
    return rows[min(row for row in rows if row >= d)]
