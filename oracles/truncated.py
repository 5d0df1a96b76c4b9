"""Sums of FP8 products as Hopper's tensor cores make them, and what they cost: 14 bits are kept.

DeepSeek-V3 (arXiv:2412.19437, section 3.5.2) and SageAttention2 (arXiv:2411.10958) describe it: an instruction shifts
the products of 32 keys and the accumulator to the exponent of the largest of them, cuts each off after 14 bits (the
leading one and 13 more) and adds them; the result keeps 14 bits too. All losses go towards zero, so they add up where
the terms have one sign, and a sum may stop growing.

With M the largest number that meets in a sum (a term, or the sum so far) a term loses up to 2^-13 M: half of that on
average, u_mma M with u_mma = 2^-14, and up to as much more or less. Over n terms, and twice n / 32 accumulators:

    random  = u_mma M (sqrt(n) + SHARE (|number of terms above 0 - number below| + n / 16))

SHARE, a third: the part with a sign of its own is no random error, of which lam = 3 times the size is accepted; as M is
that of the largest of all sums, it is at most its size. A term far below 2^-14 M loses no more than itself, and
counts as that part of one. For a score n = D, and the largest partial sum is taken as |x| + 2 sqrt(sum_d (q_d k_d)^2);
for o it is the largest P times the largest V, or the largest partial sum: `peak` of oracles.bounds where one
accumulator lives through all keys, the largest sum of a tile where each has its own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._exponents import ldexp
from ._heads import fold, unfold

BITS = 14
STEP = 32
"""Products that one instruction adds."""

SHARE = 1 / 3


def add_products(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total (..., n, m) + a (..., n, d) @ b (..., d, m), instruction by instruction; float32 that holds FP8 values."""
    for start in range(0, a.shape[-1], STEP):
        part = slice(start, start + STEP)
        products = a[..., part, None] * b[..., None, part, :]
        terms = torch.cat([products, total[..., None, :]], -2)
        exponent = torch.frexp(terms.abs().amax(-2, keepdim=True))[1]
        total = _kept(_kept(terms, exponent).sum(-2))
    return total


def _kept(x: Tensor, exponent: Tensor | None = None) -> Tensor:
    """x without what lies below its last bit kept, where a number of this exponent (None: its own) has its first."""
    shift = (torch.frexp(x)[1] if exponent is None else exponent) - BITS
    return ldexp(ldexp(x, -shift).trunc_(), shift)


def lost_scores(q: Tensor, k: Tensor, s: Tensor, scale: float, unit: float) -> Tensor:
    """What the sums cut off the scores s = scale q k^T (B, Hq, n, Lk); unit: u_mma."""
    hkv, d = k.shape[1], q.shape[-1]
    size = unfold(fold(q.square(), hkv) @ k.square().mT, q).sqrt_().mul_(2 * abs(scale)).add_(s.abs())
    signs = unfold(fold(q.sign(), hkv) @ k.sign().mT, q).abs_()
    return signs.add_(d / 16).mul_(SHARE).add_(math.sqrt(d)).mul_(size).mul_(unit)


def lost_values(p: Tensor, v: Tensor, peak: Tensor, terms: Tensor, unit: float, tile: int) -> Tensor:
    """The same of o = p v (B, Hq, n, Dv): p (B, Hq, n, Lk), v (B, Hkv, Lk, Dv); terms: the keys that each row sees.

    tile: keys of a sum; 0: all.
    """
    if not v.shape[2]:
        return torch.zeros_like(peak)
    hkv = v.shape[1]
    size = fold(p.amax(-1, keepdim=True), hkv) * v.abs().amax(2, keepdim=True)
    if not tile:
        size = torch.maximum(size, fold(peak, hkv))
    for start in range(0, v.shape[2] if tile else 0, tile or 1):
        part = slice(start, start + tile)
        size = torch.maximum(size, (fold(p[..., part], hkv) @ v[:, :, part]).abs_())
    least = size.amin(-1, keepdim=True).mul_(unit)
    weight = (fold(p, hkv) * v.abs().amax((2, 3), keepdim=True) / least.masked_fill_(least == 0, 1)).clamp_max_(1)
    count = (weight @ v.sign()).abs_().mul_(SHARE).add_(weight.sum(-1, keepdim=True).sqrt_())
    return unfold(count * size, peak).add_(unfold(size, peak) * terms * (SHARE / 16)).mul_(unit)
