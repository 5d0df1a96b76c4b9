"""One attention problem in float64 whose every part can be replaced: what alternatives are computed with.

The oracles compute what is right and cannot be bent. Here each part of the definition is a field of `Problem`, so that
an alternative is a `dataclasses.replace`, on a sample of query rows where the whole would take too long.

Shapes: q (B, Hq, n, D) for the n sampled rows; k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv); scores (B, Hq, n, Lk).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..cases import Case
from ..inputs import Inputs

Band = tuple[int | None, int | None]
LOG2E = math.log2(math.e)


class Weights(NamedTuple):
    """p (B, Hq, n, Lk): what values are multiplied by; lse (B, Hq, n)."""

    p: Tensor
    lse: Tensor


class Values(NamedTuple):
    """o (B, Hq, n, Dv), lse (B, Hq, n), and the p that led to them, (B, Hq, n, Lk)."""

    o: Tensor
    lse: Tensor
    p: Tensor


@dataclass(frozen=True, eq=False)
class Problem:
    """The parts of one problem; float64 on the inputs' device.

    rows (n,): the query rows at hand. heads (Hq,): the kv head that each query head reads. diagonal: the key on which
    row 0 stands; alibi_diagonal: the one from which ALiBi counts. sides: keys left and right of it that a row sees.
    band (n, Lk) and mask (B or 1, Hq or 1, n or 1, Lk or 1): visibility by position and by the mask; None: all.
    sinks (Hq, n or 1); slopes (Hq, 1, 1); bias (B or 1, Hq or 1, n or 1, Lk or 1), of the rows at hand.
    hidden: the score of a hidden key. reach (n, Lk): what is computed at all; outside of it P is 0.
    count: how often a key counts, broadcastable to the scores; padding: further keys of score 0, without a value.
    build, normalise, finish: the three steps from products to the output.
    """

    case: Case
    inputs: Inputs
    rows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    heads: Tensor
    lq: int
    lk: int
    scale: float
    diagonal: int
    alibi_diagonal: int
    sides: Band
    band: Tensor | None
    softcap: float | None
    slopes: Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    hidden: float = -torch.inf
    reach: Tensor | None = None
    count: Tensor | None = None
    padding: int = 0
    build: Callable[[Problem], Tensor] = lambda p: scores(p)
    normalise: Callable[[Problem, Tensor], Weights] = lambda p, s: softmax(p, s)
    finish: Callable[[Problem, Values], Values] = lambda p, out: out
    known: list[Tensor] = field(default_factory=list)

    @property
    def keys(self) -> Tensor:
        return torch.arange(self.lk, device=self.q.device)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def visible(self) -> Tensor | None:
        """Which key each row sees, broadcastable to the scores."""
        if self.band is None or self.mask is None:
            return self.band if self.mask is None else self.mask
        return self.band & self.mask


def pose(inputs: Inputs, alignment: str, rows: Tensor) -> Problem:
    """The right problem for these query rows (n,)."""
    case = inputs.case
    lq, lk = inputs.q.shape[2], inputs.k.shape[2]
    hq, hkv = inputs.q.shape[1], inputs.k.shape[1]
    device = inputs.q.device
    q, k, v = inputs.exact()
    diagonal = lk - lq if alignment == "bottom-right" else 0
    left, right = case.window or (None, None)
    if case.causal:
        right = 0 if right is None else min(right, 0)
    return Problem(
        case=case,
        inputs=inputs,
        rows=rows,
        q=q[:, :, rows].double(),
        k=k.double(),
        v=v.double(),
        heads=torch.arange(hq, device=device) // (hq // hkv),
        lq=lq,
        lk=lk,
        scale=inputs.q.shape[-1] ** -0.5 if case.scale is None else case.scale,
        diagonal=diagonal,
        alibi_diagonal=diagonal,
        sides=(left, right),
        band=band(rows, lk, diagonal, left, right),
        softcap=case.softcap,
        slopes=None if inputs.alibi_slopes is None else inputs.alibi_slopes.double()[:, None, None],
        bias=None if inputs.bias is None else of_rows(inputs.bias.double(), rows),
        mask=None if inputs.mask is None else of_rows(inputs.mask, rows),
        sinks=None if inputs.sinks is None else inputs.sinks.double()[:, None],
    )


def of_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows (n,) of x (B or 1, Hq or 1, Lq or 1, Lk or 1)."""
    return x if x.shape[2] == 1 else x[:, :, rows]


def band(rows: Tensor, lk: int, diagonal: int, left: int | None, right: int | None) -> Tensor | None:
    """(n, Lk): keys from `left` before to `right` after the key on which each row stands; None: all."""
    if left is None and right is None:
        return None
    offset = torch.arange(lk, device=rows.device) - (rows + diagonal)[:, None]
    seen = torch.ones_like(offset, dtype=torch.bool)
    if left is not None:
        seen &= offset >= -left
    if right is not None:
        seen &= offset <= right
    return seen


def banded(p: Problem, left: int | None, right: int | None, diagonal: int | None = None) -> Problem:
    """The problem with other sides, and perhaps on another diagonal."""
    where = p.diagonal if diagonal is None else diagonal
    return replace(p, band=band(p.rows, p.lk, where, left, right), sides=(left, right), diagonal=where)


def products(p: Problem) -> Tensor:
    """q k^T (B, Hq, n, Lk), computed once for all problems that share q, k and heads."""
    known = p.known
    if known and known[0] is p.q and known[1] is p.k and known[2] is p.heads:
        return known[3]
    found = p.q @ p.k[:, p.heads].mT
    if not known:
        known += [p.q, p.k, p.heads, found]
    return found


def distance(p: Problem) -> Tensor:
    """(n, Lk): keys between each key and the row's diagonal, positive to the left."""
    return (p.rows + p.alibi_diagonal)[:, None] - p.keys


def capped(p: Problem, s: Tensor) -> Tensor:
    return s if p.softcap is None else p.softcap * torch.tanh(s / p.softcap)


def scores(p: Problem) -> Tensor:
    """Scale, softcap, ALiBi, bias, masks: the order of the contract."""
    s = capped(p, products(p) * p.scale)
    if p.slopes is not None:
        s = s - p.slopes * distance(p).abs()
    if p.bias is not None:
        s = s + p.bias
    return masked(p, s)


def masked(p: Problem, s: Tensor) -> Tensor:
    visible = p.visible()
    if visible is not None:
        s = s.masked_fill(~visible, p.hidden)
    return s if p.reach is None else s.masked_fill(~p.reach, -torch.inf)


def peak(s: Tensor) -> Tensor:
    """The maximum of each row (B, Hq, n, 1), 0 where it is -inf."""
    if not s.shape[-1]:
        return s.new_zeros(*s.shape[:-1], 1)
    m = s.amax(-1, keepdim=True)
    return m.masked_fill(m == -torch.inf, 0)


def denominator(p: Problem, s: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """exp(s - m) (B, Hq, n, Lk), each as often as it counts, and what it is divided by (B, Hq, n, 1)."""
    e = torch.exp(s - m)
    if p.count is not None:
        e = e * p.count
    total = e.sum(-1, keepdim=True)
    if p.padding:
        total = total + p.padding * torch.exp(-m)
    if p.sinks is not None:
        total = total + torch.exp(p.sinks[..., None] - m)
    return e, total


def softmax(p: Problem, s: Tensor) -> Weights:
    m = peak(s)
    e, total = denominator(p, s, m)
    return Weights(e / total.masked_fill(total == 0, 1), (m + total.log()).squeeze(-1))


def forward(p: Problem) -> Values:
    """o, lse and p of the problem as it stands."""
    weights = p.normalise(p, p.build(p))
    return p.finish(p, Values(weights.p @ p.v[:, p.heads], weights.lse, weights.p))


def empty_rows(p: Problem) -> Tensor:
    """(B, Hq, n) or broadcastable: rows that see no key, masks and biases of -inf counted."""
    visible = p.visible()
    seen = torch.ones(1, 1, len(p.rows), p.lk, dtype=torch.bool, device=p.q.device)
    if visible is not None:
        seen = seen & visible
    if p.bias is not None:
        seen = seen & (p.bias > -torch.inf)
    return ~seen.any(-1)
