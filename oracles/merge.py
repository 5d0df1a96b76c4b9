"""Joining attention over two disjoint sets of keys, as split-KV decoding, ring attention and the online softmax do.

Each part weighs as much as its share of the denominator:

    lse = log(exp(lse_a) + exp(lse_b));  o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over both sets of keys, from that over each.

    o_a, o_b (..., Dv) and lse_a, lse_b (...), natural logarithm; any floating dtypes. Computed in float32 or, where an
    argument is float64, in that; returned in the promoted dtype of the two o and of the two lse. A part that saw no key
    (lse -inf) has no weight, whatever its o holds; two of them give o 0 and lse -inf. Differentiable where finite.

    Raises ValueError when shapes do not fit.
    """
    if o_a.shape != o_b.shape or lse_a.shape != lse_b.shape or o_a.shape[:-1] != lse_a.shape:
        raise ValueError(
            "o_a, o_b must be (..., Dv) and lse_a, lse_b (...): got "
            f"{tuple(o_a.shape)}, {tuple(lse_a.shape)}, {tuple(o_b.shape)}, {tuple(lse_b.shape)}"
        )
    o_dtype, lse_dtype = torch.promote_types(o_a.dtype, o_b.dtype), torch.promote_types(lse_a.dtype, lse_b.dtype)
    wide = torch.promote_types(torch.promote_types(o_dtype, lse_dtype), torch.float32)
    a, b = lse_a.to(wide), lse_b.to(wide)
    lse = torch.logaddexp(a, b)
    reference = lse.masked_fill(lse == -torch.inf, 0)
    o = torch.zeros_like(o_a, dtype=wide)
    for part, part_lse in ((o_a, a), (o_b, b)):
        seen = (part_lse > -torch.inf)[..., None]
        # A part without keys may hold anything, NaN included: select, do not multiply by 0.
        o = o + torch.where(seen, torch.exp(part_lse - reference)[..., None] * part.to(wide), 0)
    return o.to(o_dtype), lse.to(lse_dtype)
