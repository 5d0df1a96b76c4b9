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

from ..tiles import rounded

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
