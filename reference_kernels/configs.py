"""Tile sizes, warps and pipeline stages: one table for each kernel, by architecture, element size and head dimension.

A row holds for head dimensions up to its own; the wider of D and Dv counts. Nothing is tuned at the first call: the
same call on the same GPU model always runs the same kernel. What bounds a row is shared memory (sm_80 163 KiB, sm_89
and sm_120 99 KiB, sm_90 and sm_100 227 KiB) and 255 registers a thread: `python -m reference_kernels.compiling` shows
what the compiler makes of it. Terms of the scores (softcap, ALiBi, bias, mask) need registers of their own: with any of
them half as many rows or keys are streamed at a time. The rows of sm_90 are the fastest of measurements/h200/tune.json;
the others are what compiles well, not measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton


class Config(NamedTuple):
    """BLOCK_M query rows by BLOCK_N keys, on num_warps warps; loads are num_stages - 1 tiles ahead of their use."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


_Rows = dict[int, Config]  # greatest head dimension: Config
_C = Config

_FORWARD_16: dict[int, _Rows] = {
    80: {64: _C(128, 64, 4, 3), 128: _C(128, 64, 8, 3), 256: _C(128, 32, 8, 2)},
    89: {64: _C(128, 64, 4, 3), 128: _C(64, 64, 4, 2), 256: _C(64, 32, 4, 2)},
    90: {64: _C(64, 64, 4, 3), 128: _C(64, 64, 4, 3), 256: _C(128, 64, 8, 2)},
    100: {64: _C(128, 128, 8, 3), 128: _C(128, 128, 8, 2), 256: _C(128, 64, 8, 2)},
    120: {64: _C(128, 64, 4, 3), 128: _C(64, 64, 4, 2), 256: _C(64, 32, 4, 2)},
}
# dK, dV: BLOCK_N keys resident, BLOCK_M rows streamed. Two accumulators of BLOCK_N x D are what fills the registers.
# sm_100, D 256: with 64 keys they and their operands exceed the 512 columns of tensor memory, and Triton (3.6, 3.9)
# makes a kernel that only traps; tiles of 32 keys are multiplied by mma.sync.
_BACKWARD_KV_16: dict[int, _Rows] = {
    80: {64: _C(64, 128, 8, 2), 128: _C(32, 128, 8, 2), 256: _C(32, 64, 8, 1)},
    89: {64: _C(64, 64, 4, 2), 128: _C(32, 64, 4, 1), 256: _C(16, 32, 4, 1)},
    90: {64: _C(64, 64, 4, 2), 128: _C(32, 64, 4, 3), 256: _C(64, 64, 8, 2)},
    100: {64: _C(64, 128, 8, 2), 128: _C(64, 64, 8, 1), 256: _C(64, 32, 8, 1)},
    120: {64: _C(64, 64, 4, 2), 128: _C(32, 64, 4, 1), 256: _C(16, 32, 4, 1)},
}
# dQ: BLOCK_M rows resident, BLOCK_N keys streamed.
_BACKWARD_Q_16: dict[int, _Rows] = {
    80: {64: _C(128, 64, 8, 2), 128: _C(128, 32, 8, 2), 256: _C(64, 32, 8, 1)},
    89: {64: _C(64, 64, 4, 2), 128: _C(64, 32, 4, 1), 256: _C(32, 16, 4, 1)},
    90: {64: _C(64, 64, 4, 3), 128: _C(128, 64, 8, 3), 256: _C(128, 32, 8, 3)},
    100: {64: _C(128, 64, 8, 2), 128: _C(128, 64, 8, 1), 256: _C(64, 32, 8, 1)},
    120: {64: _C(64, 64, 4, 2), 128: _C(64, 32, 4, 1), 256: _C(32, 16, 4, 1)},
}
# float32 is multiplied by ordinary fused multiply-adds (input_precision "ieee"): small tiles, or the code explodes.
_FORWARD_32: _Rows = {64: _C(32, 32, 4, 2), 128: _C(32, 32, 8, 2), 256: _C(32, 16, 8, 1)}
_BACKWARD_32: _Rows = {64: _C(32, 32, 8, 1), 128: _C(32, 32, 8, 1), 256: _C(16, 16, 4, 1)}

# Small enough that a test's problem has several tiles, uneven so that rows and keys cannot be mixed up unnoticed.
_INTERPRETER: dict[str, Config] = {
    "forward": _C(64, 32, 1, 1),
    "backward_kv": _C(32, 64, 1, 1),
    "backward_q": _C(64, 32, 1, 1),
}

TABLES: dict[str, tuple[dict[int, _Rows], _Rows]] = {
    "forward": (_FORWARD_16, _FORWARD_32),
    "backward_kv": (_BACKWARD_KV_16, _BACKWARD_32),
    "backward_q": (_BACKWARD_Q_16, _BACKWARD_32),
}


def lookup(kernel: str, capability: int, dtype: torch.dtype, d: int, *, terms: bool = False) -> Config:
    """The row for `kernel` ("forward", "backward_kv", "backward_q") on compute capability 10 * major + minor.

    terms: whether anything but the scale is applied to the scores. An architecture without rows of its own takes those
    of the nearest older one. Raises KeyError for D > 256.
    """
    by_architecture, wide = TABLES[kernel]
    rows = wide
    if dtype.itemsize == 2:
        rows = by_architecture[max((a for a in by_architecture if a <= capability), default=min(by_architecture))]
    config = rows[min((row for row in rows if row >= d), default=d)]
    if not terms:
        return config
    if kernel == "backward_kv":
        return config._replace(block_m=max(16, config.block_m // 2))
    return config._replace(block_n=max(16, config.block_n // 2))


def config_for(kernel: str, q: torch.Tensor, d: int, *, terms: bool = False) -> Config:
    """The row for the device of q; no synchronisation, nothing measured."""
    if triton.knobs.runtime.interpret:
        return _INTERPRETER[kernel]
    major, minor = torch.cuda.get_device_capability(q.device)
    return lookup(kernel, 10 * major + minor, q.dtype, d, terms=terms)
