"""Where in a tensor (B, H, L, D) the wrong elements lie, in one sentence a kernel author can act on."""

from __future__ import annotations

from torch import Tensor

AXES = ("batch", "head", "row", "column")


def where(wrong: Tensor) -> str:
    """A sentence about the true elements of `wrong` (B, H, L, D) or (B, H, L): which rows, heads, batches, columns.

    Empty for tensors of other ranks (bias, sinks), whose index says it all.
    """
    if wrong.dim() not in (3, 4) or not wrong.any():
        return ""
    parts = []
    for axis, name in sorted(enumerate(AXES[: wrong.dim()]), key=lambda pair: (pair[0] != 2, pair[0])):
        size = wrong.shape[axis]
        hit = wrong.any(dim=tuple(a for a in range(wrong.dim()) if a != axis)).nonzero().flatten().tolist()
        if size > 1 and len(hit) < size:
            parts.append(f"{name}{'s' if len(hit) > 1 else ''} {ranges(hit)} of {size}".replace("batchs", "batches"))
    if not parts:
        return f"where: everywhere ({int(wrong.sum()) / wrong.numel():.0%} of the elements)"
    return "where: " + ", ".join(parts)


def ranges(indices: list[int], most: int = 4) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; more than `most` ranges are only counted."""
    starts = [i for n, i in enumerate(indices) if n == 0 or i != indices[n - 1] + 1]
    ends = [i for n, i in enumerate(indices) if n == len(indices) - 1 or i != indices[n + 1] - 1]
    if len(starts) > most:
        return f"{len(indices)} scattered"
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
