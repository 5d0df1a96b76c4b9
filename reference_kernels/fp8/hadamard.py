"""Incoherent processing: a rotation of Q and K that spreads what is large in a few dimensions over all of them.

    x' = x S H / sqrt(D)        S = diag(±1, …), random        H = Hadamard's matrix, H_ij = (-1)^popcount(i & j)

S H / sqrt(D) is orthogonal, so q' k'^T = q k^T: rotated by the same signs, Q and K give the same scores. But a channel
that is far larger than the others, as models have them, no longer decides the scale of its block alone: after the
rotation each of its D coordinates has a share of it, and the scale falls by up to sqrt(D). The random signs keep inputs
that happen to be aligned with H from becoming such a channel themselves. (QuaRot and FlashAttention-3 do the same.)

H of order D = 64 r is the Kronecker product of H of order r and of order 64. The inner one is a matrix product: signs
times 16-bit numbers are exact, and their sums are float32. The outer one is log2(r) levels of additions.

Accumulators: float32, rounded once after the last level.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tiles import dot, rounded, widened

HEAD_DIMS = (64, 128, 256)


def random_signs(d: int, device: torch.device | str = "cpu", *, seed: int = 0) -> Tensor:
    """(D,) float32, each 1 or -1: the S of a rotation, the same for Q and K. The same seed gives the same signs."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (d,), generator=draw) * 2 - 1).to(device, torch.float32)


@triton.jit
def rotated(x, signs, ROWS: tl.constexpr, D: tl.constexpr):
    """x (ROWS, D), 16 bits, times S H / sqrt(D), float32. signs: pointer to D float32."""
    DTYPE: tl.constexpr = x.dtype
    sign = tl.load(signs + tl.arange(0, D))[None, :]
    x = rounded(widened(x) * sign, DTYPE)
    # (64, 64): the parity of the bits that row and column have in common.
    common = tl.arange(0, 64)[:, None] & tl.arange(0, 64)[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    h = rounded(1.0 - 2.0 * (common & 1).to(tl.float32), DTYPE)
    # (ROWS * D / 64, 64)
    y = dot(tl.reshape(x, [ROWS * D // 64, 64]), h, None, "ieee")
    if D >= 128:
        y = _level(y, ROWS, D, 64)
    if D >= 256:
        y = _level(y, ROWS, D, 128)
    return tl.reshape(y, [ROWS, D]) * (1.0 / tl.sqrt(D * 1.0))


@triton.jit
def _level(y, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Sums and differences of neighbouring groups of WIDTH columns."""
    PAIRS: tl.constexpr = ROWS * D // (2 * WIDTH)
    a, b = tl.split(tl.permute(tl.reshape(y, [PAIRS, 2, WIDTH]), (0, 2, 1)))
    return tl.permute(tl.join(a + b, a - b), (0, 2, 1))
