"""Query heads of a group side by side, so that one product serves them all."""

from __future__ import annotations

from torch import Tensor


def fold(x: Tensor, hkv: int) -> Tensor:
    """(B, Hq, n, ·) as (B, Hkv, G n, ·): the query heads of a group are but more rows for their key head."""
    b, hq, n, width = x.shape
    return x.reshape(b, hkv, hq // hkv * n, width)


def unfold(x: Tensor, like: Tensor) -> Tensor:
    """(B, Hkv, G n, ·) as (B, Hq, n, ·), with Hq and n of like."""
    return x.reshape(like.shape[0], like.shape[1], like.shape[2], x.shape[-1])
