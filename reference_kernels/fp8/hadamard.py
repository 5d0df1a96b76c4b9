"""Incoherent processing: a rotation of Q and K that spreads what is large in a few dimensions over all of them.

    x' = x S H / sqrt(D)        S = diag(±1, …), random        H = Hadamard's matrix, H_ij = (-1)^popcount(i & j)

S H / sqrt(D) is orthogonal, so q' k'^T = q k^T: rotated by the same signs, Q and K give the same scores. But a channel
that is far larger than the others, as models have them, no longer decides the scale of its block alone: after the
rotation each of its D coordinates has a share of it, and the scale falls by up to sqrt(D). The random signs keep inputs
that happen to be aligned with H from becoming such a channel themselves. (QuaRot and FlashAttention-3 do the same.)

H of order D = p c is the Kronecker product of H of order p and of order c: with the columns of x in p parts of c,

    part i of x' = sum_j H_ij (x S)_j H_c / sqrt(D)

H_c is a matrix product, on tensor cores: signs times 16-bit numbers are exact, and their sums are float32. S goes into
its matrix. H of order p, 1, 2 or 4, is additions of whole tiles, number by number: nothing changes its place among
threads. The whole as one product would be D / c times the work, its steps as additions log2 D shuffles of a tile.

Accumulators: float32; 1 / sqrt(D) is left to the caller, who scales anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tiles import dot, rounded

HEAD_DIMS = (64, 128, 256)


def random_signs(d: int, device: torch.device | str = "cpu", *, seed: int = 0) -> Tensor:
    """(D,) float32, each 1 or -1: the S of a rotation, the same for Q and K. The same seed gives the same signs."""
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 2, (d,), generator=draw) * 2 - 1).to(device, torch.float32)


@triton.jit
def signed_matrix(signs, C: tl.constexpr, DTYPE: tl.constexpr):
    """S H of order C, at most 256, in DTYPE, exactly. signs: pointer to C float32."""
    # The parity of the bits that row and column have in common.
    common = tl.arange(0, C)[:, None] & tl.arange(0, C)[None, :]
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    sign = tl.load(signs + tl.arange(0, C)[:, None])  # (C, 1)
    return rounded(tl.where((common & 1) == 0, sign, -sign), DTYPE)


@triton.jit
def _product(t, signs, matrix, FIRST: tl.constexpr, PART: tl.constexpr):
    """t (M, PART), columns of a tile from FIRST on, times S H of order PART, float32. matrix: that S H, or None."""
    if matrix is None:
        matrix = signed_matrix(signs + FIRST, PART, t.dtype)
    return dot(t, matrix, None, "ieee")


@triton.jit
def rotated(t0, t1, t2, t3, signs, m0, m1, m2, m3, D: tl.constexpr, PART: tl.constexpr):
    """Rows in D / PART parts (M, PART), one, two or four, times S H, float32; in place of the other parts, any.

    m0 … m3: what signed_matrix makes of the parts of signs, or None.
    """
    z0 = _product(t0, signs, m0, 0, PART)
    z1 = z0
    z2 = z0
    z3 = z0
    if D > PART:
        z1 = _product(t1, signs, m1, PART, PART)
        z0, z1 = z0 + z1, z0 - z1
    if D > 2 * PART:
        z2 = _product(t2, signs, m2, 2 * PART, PART)
        z3 = _product(t3, signs, m3, 3 * PART, PART)
        z2, z3 = z2 + z3, z2 - z3
        z0, z2 = z0 + z2, z0 - z2
        z1, z3 = z1 + z3, z1 - z3
    return z0, z1, z2, z3
