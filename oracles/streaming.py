"""Attention in float64 without the score matrix: the second oracle, for long sequences.

The online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682): of the keys
seen so far a row keeps the largest score m, the sum of exp(s - m) and the weighted sum of values; a larger m rescales
both. The sink is simply where the recursion starts: m = sink, sum 1, no value. The backward recomputes probabilities
from lse, tile by tile (Dao et al. 2022, arXiv:2205.14135).

Written apart from oracles.dense on purpose, so that the two can check each other; what they share is the definition of
diagonals and of visibility in oracles.spec. Memory O(L): a tile is at most block x block, and only tiles are float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .dense import Attention, Gradients, check_upstream
from .spec import AttentionSpec, as4d, take


@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, rows: Tensor | None = None, block: int = 1024
) -> Attention:
    """Attention like oracles.dense.forward, for all query rows or for the given ones, in their order.

    rows: (n,) integer indices of query rows, any subset, repeats allowed; o is (B, Hq, n, Dv), lse (B, Hq, n).
    block: rows and keys of a tile. Raises ValueError when shapes do not fit or a row does not exist.
    """
    spec.check(q, k, v)
    _check_block(block)
    (b, hq, lq, _), hkv = q.shape, k.shape[1]
    rows = torch.arange(lq, device=q.device) if rows is None else rows.to(q.device, torch.long)
    if rows.dim() != 1 or (rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < lq):
        raise ValueError(f"rows must be a list of query rows between 0 and {lq - 1}")
    shape = (b, hkv, hq // hkv)
    o = torch.zeros(*shape, rows.numel(), v.shape[-1], dtype=torch.float64, device=q.device)
    lse = torch.zeros(*shape, rows.numel(), dtype=torch.float64, device=q.device)
    for start in range(0, rows.numel(), block):
        part = rows[start : start + block]
        qr = _grouped(q, hkv).index_select(3, part).double()
        m = torch.full((*shape, part.numel()), -torch.inf, dtype=torch.float64, device=q.device)
        total = torch.zeros_like(m)
        if spec.sinks is not None:
            m = m.copy_(spec.sinks.double().view(1, hkv, -1, 1))
            total = total + 1
        acc = torch.zeros(*m.shape, v.shape[-1], dtype=torch.float64, device=q.device)
        for keys in _blocks(k.shape[2], block, q.device):
            s, _ = _tile(qr, k[:, :, keys].double(), spec, part, keys, lq, k.shape[2])
            m_new = torch.maximum(m, s.amax(-1))
            finite = torch.where(m_new == -torch.inf, 0.0, m_new)
            p = torch.exp(s - finite[..., None])
            rescale = torch.exp(m - finite)
            total = total * rescale + p.sum(-1)
            acc = acc * rescale[..., None] + torch.einsum("bhgqk,bhkd->bhgqd", p, v[:, :, keys].double())
            m = m_new
        o[..., start : start + block, :] = acc / torch.where(total > 0, total, 1.0)[..., None]
        lse[..., start : start + block] = m + torch.log(total)
    return Attention(o.flatten(1, 2), lse.flatten(1, 2))


@torch.no_grad()
def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    block: int = 1024,
) -> Gradients:
    """Gradients like oracles.dense.backward; memory O(L), besides a dbias of the size of the bias.

    block: rows and keys of a tile. Raises ValueError when shapes do not fit.
    """
    check_upstream(q, v, do, dlse)
    o, lse = forward(q, k, v, spec, block=block)
    hkv, lq, lk, scale = k.shape[1], q.shape[2], k.shape[2], spec.scale_for(q.shape[-1])
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64, device=q.device) for x in (q, k, v))
    bias = None if spec.bias is None else as4d(spec.bias)
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=torch.float64, device=q.device)
    dsinks = None if spec.sinks is None else torch.zeros(q.shape[1], dtype=torch.float64, device=q.device)
    for rows in _blocks(lq, block, q.device):
        qr, dor = (_grouped(x, hkv).index_select(3, rows).double() for x in (q, do))
        lse_r, pull = lse[:, :, rows], (dor.flatten(1, 2) * o[:, :, rows]).sum(-1)
        if dlse is not None:
            pull = pull - dlse[:, :, rows].double()
        if dsinks is not None and spec.sinks is not None:
            dsinks -= torch.einsum("bhq,bhq->h", torch.exp(spec.sinks.double()[None, :, None] - lse_r), pull)
        pull, lse_r = (x.unflatten(1, (hkv, -1))[..., None] for x in (pull, lse_r))
        lse_r = torch.where(lse_r == -torch.inf, 0.0, lse_r)
        for keys in _blocks(lk, block, q.device):
            kb, vb = k[:, :, keys].double(), v[:, :, keys].double()
            s, slope = _tile(qr, kb, spec, rows, keys, lq, lk)
            p = torch.exp(s - lse_r)
            dv[:, :, keys] += torch.einsum("bhgqk,bhgqd->bhkd", p, dor)
            ds = p * (torch.einsum("bhgqd,bhkd->bhgqk", dor, vb) - pull)
            if dbias is not None:
                _add_broadcast(dbias, ds.flatten(1, 2), rows, keys)
            ds = ds * (slope * scale)
            dq[:, :, rows] += torch.einsum("bhgqk,bhkd->bhgqd", ds, kb).flatten(1, 2)
            dk[:, :, keys] += torch.einsum("bhgqk,bhgqd->bhkd", ds, qr)
    return Gradients(dq, dk, dv, None if spec.bias is None or dbias is None else dbias.reshape(spec.bias.shape), dsinks)


def _tile(
    qr: Tensor, kb: Tensor, spec: AttentionSpec, rows: Tensor, keys: Tensor, lq: int, lk: int
) -> tuple[Tensor, Tensor | float]:
    """Scores (B, Hkv, G, n, m) of some rows and keys, and their derivative by the scaled products."""
    s = torch.einsum("bhgqd,bhkd->bhgqk", qr, kb) * spec.scale_for(qr.shape[-1])
    slope: Tensor | float = 1.0
    if spec.softcap is not None:
        slope = torch.cosh(s / spec.softcap).pow(-2)
        s = torch.tanh(s / spec.softcap) * spec.softcap
    s = s.flatten(1, 2)
    if spec.alibi_slopes is not None:
        distance = (keys[None, :] - spec.diagonal(rows, lq, lk)[:, None]).abs()
        s = s - torch.einsum("...h,qk->...hqk", spec.alibi_slopes.double(), distance.double())
    if spec.bias is not None:
        s = s + take(spec.bias, rows, keys).double()
    visible = spec.visible(rows, keys, lq, lk)
    if visible is not None:
        s = torch.where(visible, s, -torch.inf)
    return s.unflatten(1, (qr.shape[1], qr.shape[2])), slope


def _add_broadcast(total: Tensor, tile: Tensor, rows: Tensor, keys: Tensor) -> None:
    """Adds a tile (B, Hq, n, m) of a gradient to the total of a tensor that was broadcast."""
    for axis, size in enumerate(total.shape):
        if size == 1:
            tile = tile.sum(axis, keepdim=True)
    r = slice(None) if total.shape[2] == 1 else slice(int(rows[0]), int(rows[-1]) + 1)
    c = slice(None) if total.shape[3] == 1 else slice(int(keys[0]), int(keys[-1]) + 1)
    total[:, :, r, c] += tile


def _grouped(x: Tensor, hkv: int) -> Tensor:
    """(B, Hq, L, ·) as (B, Hkv, G, L, ·)."""
    return x.reshape(x.shape[0], hkv, x.shape[1] // hkv, *x.shape[2:])


def _blocks(length: int, block: int, device: torch.device) -> Iterator[Tensor]:
    _check_block(block)
    for start in range(0, length, block):
        yield torch.arange(start, min(start + block, length), device=device)


def _check_block(block: int) -> None:
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
