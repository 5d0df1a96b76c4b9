"""The noise floor: blocked flash attention in plain PyTorch with exactly the roundings that tensor cores require.

P and dS are rounded to p_dtype before their second product, everything else is float32, outputs are rounded to the
input dtype. An honest kernel has the same RMS error to a few per cent; one that has more rounds where it need not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ._heads import fold, unfold
from .dense import check_upstream
from .spec import AttentionSpec, as4d, reduce_to, region, take
from .truncated import add_products


@torch.no_grad()
def emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    do: Tensor | None = None,
    dlse: Tensor | None = None,
    block: int = 64,
    p_dtype: torch.dtype | None = None,
    p_scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
    fp8_sums: str = "fp32",
) -> dict[str, Tensor]:
    """What a flash-attention kernel gives that visits keys in tiles of `block`.

    "o" (B, Hq, Lq, Dv) in q's dtype and "lse" (B, Hq, Lq) float32. Given do, and perhaps dlse, also "dq", "dk", "dv",
    and where the spec has them "dbias", "dsinks", in q's dtype: P recomputed from lse, Delta from the rounded o.
    p_dtype: of P and dS; None is q's. p_scale: what P is multiplied by before it is rounded. out_dtype: of o; None is
    q's. FP8: q, k and v as float32 with their descales in them; fp8_sums: how their products are added up, of
    oracles.arithmetic.FP8_SUMS. Raises ValueError when shapes do not fit.
    """
    spec.check(q, k, v)
    with _true_float32(q.device):
        o, lse = _forward(q, k, v, spec, block, p_dtype or q.dtype, p_scale, fp8_sums)
        o = o.to(out_dtype or q.dtype)
        out = {"o": o, "lse": lse}
        if do is not None:
            check_upstream(q, v, do, dlse)
            out |= _backward(q, k, v, spec, o, lse, do, dlse, block, p_dtype or q.dtype)
    return out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    block: int,
    p_dtype: torch.dtype,
    p_scale: float,
    fp8_sums: str,
) -> tuple[Tensor, Tensor]:
    hkv, qf = k.shape[1], q.float()
    m = qf.new_full((*q.shape[:3], 1), -torch.inf)
    total, acc = torch.zeros_like(m), qf.new_zeros(*q.shape[:3], v.shape[-1])
    short = fp8_sums != "fp32"
    for keys in range(0, k.shape[2], block):
        tile = slice(keys, keys + block)
        s, _ = _scores(qf, k, spec, tile, short=short)
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        finite = m_new.masked_fill(m_new == -torch.inf, 0)
        p, rescale = (s - finite).exp_(), (m - finite).exp_()
        total = total.mul_(rescale).add_(p.sum(-1, keepdim=True))
        acc, values = acc.mul_(rescale), v[:, :, tile].float()
        p = fold(_rounded(p * p_scale, p_dtype), hkv)
        if short and p_dtype.itemsize == 1:
            begun = fold(acc, hkv) if fp8_sums == "14 bits" else p.new_zeros(*p.shape[:3], v.shape[-1])
            added = unfold(add_products(begun, p, values), q)
            acc = added if fp8_sums == "14 bits" else acc + added
        else:
            acc = acc.add_(unfold(p @ values, q))
        m = m_new
    if spec.sinks is not None:
        sink = spec.sinks.float()[None, :, None, None]
        m_new = torch.maximum(m, sink)
        rescale = (m - m_new).exp()
        m, total, acc = m_new, total * rescale + (sink - m_new).exp(), acc * rescale
    return acc / (total.masked_fill(total == 0, 1) * p_scale), (m + total.log()).squeeze(-1)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    block: int,
    p_dtype: torch.dtype,
) -> dict[str, Tensor]:
    hkv, scale, qf, dof = k.shape[1], spec.scale_for(q.shape[-1]), q.float(), do.float()
    delta = (dof * o.float()).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= dlse.float()[..., None]
    finite = lse.masked_fill(lse == -torch.inf, 0)[..., None]
    dq = torch.zeros_like(qf)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
    dbias = None if spec.bias is None else torch.zeros(as4d(spec.bias).shape, dtype=torch.float32, device=q.device)
    for keys in range(0, k.shape[2], block):
        tile = slice(keys, keys + block)
        kt, vt = k[:, :, tile].float(), v[:, :, tile].float()
        s, slope = _scores(qf, k, spec, tile)
        p = s.sub_(finite).exp_()
        ds = unfold(fold(dof, hkv) @ vt.mT, q).sub_(delta).mul_(p)
        dv[:, :, tile] = fold(_rounded(p, p_dtype), hkv).mT @ fold(dof, hkv)
        if dbias is not None:
            at = region(dbias, slice(None), slice(None), slice(None), tile)
            dbias[at] += reduce_to(ds, tuple(dbias[at].shape))
        dx = fold(_rounded(ds if slope is None else ds * slope, p_dtype), hkv)
        dq += unfold(dx @ kt, q)
        dk[:, :, tile] = dx.mT @ fold(qf, hkv)
    out = {"dq": dq * scale, "dk": dk * scale, "dv": dv}
    if dbias is not None and spec.bias is not None:
        out["dbias"] = dbias.reshape(spec.bias.shape)
    if spec.sinks is not None:
        p_sink = torch.exp(spec.sinks.float()[None, :, None] - lse)
        out["dsinks"] = -(p_sink * delta.squeeze(-1)).sum((0, 2))
    return {name: x.to(q.dtype) for name, x in out.items()}


def _scores(
    qf: Tensor, k: Tensor, spec: AttentionSpec, tile: slice, *, short: bool = False
) -> tuple[Tensor, Tensor | None]:
    """float32 scores of all rows against a tile of keys, and their derivative where there is a softcap.

    short: their products are summed in 14 bits.
    """
    lq, lk = qf.shape[2], k.shape[2]
    kt = k[:, :, tile].float()
    queries = fold(qf, k.shape[1])
    s = add_products(qf.new_zeros(*queries.shape[:3], kt.shape[2]), queries, kt.mT) if short else queries @ kt.mT
    s = unfold(s, qf).mul_(spec.scale_for(qf.shape[-1]))
    slope = None
    if spec.softcap is not None:
        t = torch.tanh(s / spec.softcap)
        s, slope = t * spec.softcap, 1 - t * t
    rows = torch.arange(lq, device=qf.device)
    keys = torch.arange(tile.start, min(tile.stop, lk), device=qf.device)
    slopes = spec.slopes()
    if slopes is not None:
        s -= slopes.float() * (spec.diagonal(rows, lq, lk)[:, None] - keys).abs()
    if spec.bias is not None:
        s += take(spec.bias, rows, keys).float()
    visible = spec.visible(rows, keys, lq, lk)
    if visible is not None:
        s.masked_fill_(~visible, -torch.inf)
    return s, slope


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as dtype holds it, in float32, where products of 16-bit numbers are exact as in tensor cores."""
    return x if dtype in (torch.float32, torch.float64) else x.to(dtype).float()


@contextmanager
def _true_float32(device: torch.device) -> Iterator[None]:
    """Neither tf32, nor bf16 products, nor autocast, whatever the caller has switched on; restored afterwards.

    Through fp32_precision (torch >= 2.9), which reads and writes the same state as allow_tf32 and
    set_float32_matmul_precision; restoring what it said leaves those consistent too.
    """
    backends: Any = torch.backends  # its stubs lack mkldnn.matmul
    switch = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        switch.fp32_precision = before
