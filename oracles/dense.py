"""Attention as its definition says, with the whole score matrix, in float64: the first oracle.

    x = scale * q k^T;  s = softcap(x) - slope * distance + bias, -inf where hidden
    lse = log(sum_j exp(s_j) + exp(sink));  p = exp(s - lse);  o = p v

    dS = p * (do v^T - sum_d(do * o) + dlse)      since d lse / d s = p
    dv = p^T do;  dq = scale * (dS * ds/dx) k;  dk = scale * (dS * ds/dx)^T q;  dbias = dS
    dsink = sum over batch and rows of p_sink * (dlse - sum_d(do * o))

Memory O(Lq Lk): use oracles.streaming for long sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .spec import AttentionSpec, reduce_to, take


class Attention(NamedTuple):
    """o (B, Hq, Lq, Dv) and lse (B, Hq, Lq), natural logarithm, sink included; float64."""

    o: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Gradients in float64, each in the shape of what it belongs to; dbias and dsinks are None where there is none."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dsinks: Tensor | None


@torch.no_grad()
def forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Attention:
    """Attention of q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv), any floating dtype and device.

    A row that sees no key gives o 0 and lse -inf, or lse = sink. Raises ValueError when shapes do not fit (spec.check).
    """
    p, lse, _ = _softmax(q, k, v, spec)
    return Attention(p @ _per_query_head(v, q), lse)


@torch.no_grad()
def probabilities(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Normalised probabilities (B, Hq, Lq, Lk), float64; with a sink, rows sum to less than 1. v: shape only."""
    return _softmax(q, k, v, spec)[0]


@torch.no_grad()
def backward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, do: Tensor, dlse: Tensor | None = None) -> Gradients:
    """Gradients of sum(o * do) + sum(lse * dlse), analytically.

    do (B, Hq, Lq, Dv), dlse (B, Hq, Lq) or None for zero. A row that sees no key contributes 0 (to dsinks: its dlse).
    Raises ValueError when shapes do not fit.
    """
    check_upstream(q, v, do, dlse)
    p, lse, slope = _softmax(q, k, v, spec)
    scale = spec.scale_for(q.shape[-1])
    do = do.double()
    vh = _per_query_head(v, q)
    delta = (do * (p @ vh)).sum(-1)
    push = -delta if dlse is None else dlse.double() - delta
    ds = p * (do @ vh.mT + push[..., None])
    dx = ds if slope is None else ds * slope
    dsinks = None
    if spec.sinks is not None:
        sink = spec.sinks.double()[None, :, None]
        dsinks = (torch.exp(sink - lse) * push).sum((0, 2))
    return Gradients(
        dq=scale * (dx @ _per_query_head(k, q)),
        dk=_per_key_head(scale * (dx.mT @ q.double()), k),
        dv=_per_key_head(p.mT @ do, v),
        dbias=None if spec.bias is None else reduce_to(ds, tuple(spec.bias.shape)),
        dsinks=dsinks,
    )


def check_upstream(q: Tensor, v: Tensor, do: Tensor, dlse: Tensor | None) -> None:
    """Raises ValueError unless do and dlse have the shapes of o and lse."""
    shape = (*q.shape[:3], v.shape[-1])
    if tuple(do.shape) != shape:
        raise ValueError(f"do must have the shape of o, {tuple(shape)}, got {tuple(do.shape)}")
    if dlse is not None and dlse.shape != q.shape[:3]:
        raise ValueError(f"dlse must have the shape of lse, {tuple(q.shape[:3])}, got {tuple(dlse.shape)}")


def _softmax(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor | None]:
    """p (B, Hq, Lq, Lk), lse (B, Hq, Lq), and ds/dx where there is a softcap."""
    spec.check(q, k, v)
    lq, lk = q.shape[2], k.shape[2]
    rows, keys = torch.arange(lq, device=q.device), torch.arange(lk, device=q.device)
    s = spec.scale_for(q.shape[-1]) * (q.double() @ _per_query_head(k, q).mT)
    slope = None
    if spec.softcap is not None:
        t = torch.tanh(s / spec.softcap)
        s, slope = spec.softcap * t, 1 - t * t
    slopes = spec.slopes()
    if slopes is not None:
        s = s - slopes * (spec.diagonal(rows, lq, lk)[:, None] - keys).abs()
    if spec.bias is not None:
        s = s + take(spec.bias, rows, keys).double()
    visible = spec.visible(rows, keys, lq, lk)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(s, -1)
    if spec.sinks is not None:
        lse = torch.logaddexp(lse, spec.sinks.double()[None, :, None])
    # exp(-inf - 0) rather than exp(-inf + inf) in rows that see nothing.
    p = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    return p, lse, slope


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """x (B, Hkv, L, ·) in float64, one copy for each query head."""
    return x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _per_key_head(x: Tensor, like: Tensor) -> Tensor:
    """x (B, Hq, L, ·) summed over the query heads that share a key head."""
    b, hq, lk, width = x.shape
    return x.reshape(b, like.shape[1], hq // like.shape[1], lk, width).sum(2)
