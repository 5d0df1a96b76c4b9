"""Memory layouts: the same values as views of differently ordered, padded, offset, fused or expanded buffers.

Every function returns a tensor with axes (B, H, L, D); only its strides, offset and surroundings differ. Memory that
belongs to no element is NaN, so a kernel that reads it cannot go unnoticed ("far" leaves its gigabytes untouched).
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD = 8
"""Elements of padding between rows: 16 bytes in fp16, so rows stay aligned for vector loads and TMA."""

CACHE_ROWS = 128
"""Rows behind the last one of a cache: the largest key tile, so a tail tile that reads on reads NaN."""

FAR = 2**31
"""Elements from the first batch element to the last: the first offset that 32 bits with a sign cannot hold."""


def place(x: Tensor, layout: str, native: str) -> Tensor:
    """`x` (B, H, L, D) in `layout` ("plain", "swapped", "padded", "unaligned", "dmajor", "cache").

    native: "bhsd" or "bshd", the order of axes that the implementation takes.
    Raises ValueError for an unknown layout.
    """
    if layout == "plain":
        return _ordered(x, native)
    if layout == "swapped":
        return _ordered(x, "bshd" if native == "bhsd" else "bhsd")
    if layout == "dmajor":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "cache":
        behind = x.new_full((*x.shape[:2], CACHE_ROWS, x.shape[3]), float("nan"))
        return _ordered(torch.cat([x, behind], 2), native)[:, :, : x.shape[2]]
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


def place_far(tensors: tuple[Tensor, ...], native: str) -> tuple[Tensor, ...]:
    """Views of one buffer, each contiguous in `native` order but for the batch, whose last element lies FAR behind."""
    batch, x = tensors[0].shape[0], tensors[0]
    pitch = -(-FAR // (batch - 1))
    sizes = [t[0].numel() for t in tensors]
    buffer = x.new_empty((batch - 1) * pitch + sum(sizes))  # on a CPU only the pages that are written become real
    views, start = [], 0
    for t, size in zip(tensors, sizes, strict=True):
        view = buffer.as_strided(t.shape, (pitch, *_ordered(t, native).stride()[1:]), start)
        views.append(view.copy_(t))
        start += size
    return tuple(views)


def _ordered(x: Tensor, order: str) -> Tensor:
    return x.contiguous() if order == "bhsd" else x.transpose(1, 2).contiguous().transpose(1, 2)
