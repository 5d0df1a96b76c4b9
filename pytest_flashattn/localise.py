"""Where in a tensor (B, H, L, D) the wrong elements lie, in one sentence a kernel author can act on."""

from __future__ import annotations

import torch
from torch import Tensor

AXES = ("batch", "head", "row", "column")


def where(wrong: Tensor) -> str:
    """A sentence about the true elements of `wrong` (B, H, L, D) or (B, H, L): which rows, heads, batches, columns.

    Empty for tensors of other ranks (bias, sinks), whose index says it all.
    """
    if wrong.dim() not in (3, 4) or not wrong.any():
        return ""
    parts = []
    for axis, name in reversed(list(enumerate(AXES[: wrong.dim()]))):
        size = wrong.shape[axis]
        hit = wrong.any(dim=tuple(a for a in range(wrong.dim()) if a != axis)).nonzero().flatten().tolist()
        if size > 1 and len(hit) < size:
            parts.append((axis, f"{name} {_ranges(hit)} of {size}"))
    if not parts:
        return f"where: everywhere ({int(wrong.sum()) / wrong.numel():.0%} of the elements)"
    return "where: " + ", ".join(text for _, text in sorted(parts, key=lambda p: (p[0] != 2, p[0])))


def _ranges(indices: list[int], most: int = 4) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; more than `most` ranges are cut short."""
    tensor = torch.tensor(indices)
    starts = [i for i in range(len(indices)) if i == 0 or tensor[i] != tensor[i - 1] + 1]
    ends = [s - 1 for s in starts[1:]] + [len(indices) - 1]
    texts = [str(indices[a]) if a == b else f"{indices[a]}-{indices[b]}" for a, b in zip(starts, ends, strict=True)]
    if len(texts) > most:
        return ", ".join(texts[:most]) + f", … ({len(indices)} in all)"
    return ", ".join(texts)
