"""Memory layouts: the same values as views of differently ordered, padded, offset, fused or expanded buffers.

Every function returns a tensor with axes (B, H, L, D); only its strides, offset and surroundings differ. Memory that
belongs to no element is NaN, so a kernel that reads it cannot go unnoticed.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD = 8
"""Elements of padding between rows: 16 bytes in fp16, so rows stay aligned for vector loads and TMA."""


def place(x: Tensor, layout: str, native: str) -> Tensor:
    """`x` (B, H, L, D) in `layout` ("plain", "swapped", "padded", "unaligned", "dmajor"); `native`: "bhsd" or "bshd".

    Raises ValueError for an unknown layout.
    """
    if layout == "plain":
        return _ordered(x, native)
    if layout == "swapped":
        return _ordered(x, "bshd" if native == "bhsd" else "bhsd")
    if layout == "dmajor":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout in ("padded", "unaligned"):
        pad, offset = (PAD, PAD) if layout == "padded" else (0, 1)
        order = (0, 1, 2, 3) if native == "bhsd" else (0, 2, 1, 3)
        shape = [x.shape[axis] for axis in order]
        shape[-1] += pad
        buffer = torch.full((offset + torch.Size(shape).numel(),), float("nan"), dtype=x.dtype, device=x.device)
        view = buffer[offset:].view(shape)[..., : x.shape[-1]].permute(order)  # both orders are their own inverse
        view.copy_(x)
        return view
    raise ValueError(f"unknown layout {layout!r}")


def place_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one fused projection (B, L, Hq + 2 Hkv, D), as every transformer block makes it."""
    fused = _ordered(torch.cat([q, k, v], dim=1), "bshd")
    a, b, c = fused.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
    return a, b, c


def _ordered(x: Tensor, order: str) -> Tensor:
    return x.contiguous() if order == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)
