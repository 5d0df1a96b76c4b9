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
    """elements: of a tile for each thread, which gives the warps. part: columns of a rotation's matrix product. ahead:
    blocks that a rotation loads ahead of their turn, in so many `programs` a multiprocessor; 0: a program a block.
    """

    elements: int
    part: int = 64
    ahead: int = 0
    programs: int = 0


_Q = QuantiserConfig
_ALONE: dict[str, dict[int, QuantiserConfig]] = {
    "rows": {64: _Q(64), 128: _Q(64), 256: _Q(128)},
    "columns": {d: _Q(64) for d in (64, 128, 256)},
    "rotated": {64: _Q(64), 128: _Q(64), 256: _Q(128)},
}
QUANTISERS: dict[int, dict[str, dict[int, QuantiserConfig]]] = {
    89: _ALONE,
    90: {
        "rows": {d: _Q(64) for d in (64, 128, 256)},
        "columns": {d: _Q(64) for d in (64, 128, 256)},
        "rotated": {64: _Q(64, 64, 1, 3), 128: _Q(64, 64, 1, 2), 256: _Q(128, 64, 1, 1)},
    },
    100: _ALONE,
}
"""Of the quantiser, by architecture, what it does, and head dimension; rotated columns are "rotated". On Hopper the
fastest of measurements/h200/fp8-quantisers.json, elsewhere what compiles without spills. Blocks ahead need 172 to 213
KB of shared memory at D = 256, which only architectures with 227 KB have."""

MOST_WARPS = 16


def quantiser_config(capability: int, d: int, *, rotated: bool, transposed: bool) -> QuantiserConfig:
    """The row for a head dimension up to 256 on compute capability 10 * major + minor; older ones have the oldest's."""
    table = QUANTISERS[max((a for a in QUANTISERS if a <= capability), default=OLDEST)]
    rows = table["rotated" if rotated else "columns" if transposed else "rows"]
    return rows[min(row for row in rows if row >= d)]


def quantiser_config_for(x: torch.Tensor, *, rotated: bool, transposed: bool) -> QuantiserConfig:
    """The row for x (B, H, L, D) on its device; in the interpreter that of Hopper."""
    major, minor = (9, 0) if triton.knobs.runtime.interpret else torch.cuda.get_device_capability(x.device)
    return quantiser_config(10 * major + minor, x.shape[3], rotated=rotated, transposed=transposed)
