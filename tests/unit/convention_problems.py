"""Problems, a plain float64 reference, and functions that decode their native call on their own."""

from __future__ import annotations

import math

import torch

B, HQ, HKV, LQ, LK, D = 2, 4, 2, 5, 8, 16


def reference(
    q,
    k,
    v,
    *,
    causal=False,
    scale=None,
    window=None,
    softcap=None,
    alibi_slopes=None,
    bias=None,
    return_lse=False,
    alignment="bottom-right",
):
    """The contract in float64, (B, H, L, D) in and out; returns (out, lse) whatever return_lse says."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    lq, lk = q.shape[2], k.shape[2]
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    shift = lk - lq if alignment == "bottom-right" else 0
    distance = torch.arange(lk)[None, :] - torch.arange(lq)[:, None] - shift  # > 0: beyond the diagonal
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[:, None, None] * distance.abs()
    if bias is not None:
        s = s.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else s + bias.double()
    left, right = window or (None, None)
    if causal:
        s = s.masked_fill(distance > 0, -math.inf)
    if left is not None:
        s = s.masked_fill(distance < -left, -math.inf)
    if right is not None:
        s = s.masked_fill(distance > right, -math.inf)
    lse = s.logsumexp(-1)
    return torch.softmax(s, -1).nan_to_num(0.0) @ v, lse


def qkv(lq=LQ, lk=LK, *, hkv=HKV, dtype=torch.float32, d=D, b=B):
    generator = torch.Generator().manual_seed(0)
    shapes = (b, HQ, lq, d), (b, hkv, lk, d), (b, hkv, lk, d)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def words(text):
    return set(text.split())


def check(implementation, options, *, lse=False, inputs=None, **reference_options):
    """The implementation called canonically gives what the reference gives."""
    q, k, v = qkv() if inputs is None else inputs
    out, got_lse = implementation.call(q, k, v, options, return_lse=lse)
    want, want_lse = reference(q, k, v, **options, **reference_options)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    assert out.dtype == q.dtype
    if lse:
        assert got_lse.dtype == torch.float32
        torch.testing.assert_close(got_lse.double(), want_lse, atol=1e-5, rtol=1e-5)
    else:
        assert got_lse is None


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = torch.randn(1, HQ, LQ, LK, generator=torch.Generator().manual_seed(1))
MASK = torch.rand(B, 1, LQ, LK, generator=torch.Generator().manual_seed(2)) > 0.4
EMPTY_ROW = MASK.clone()
EMPTY_ROW[:, :, 2] = False


def canonical(
    q, k, v, *, causal=False, scale=None, window=None, softcap=None, alibi_slopes=None, bias=None, return_lse=False
):
    out, lse = reference(
        q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes, bias=bias
    )
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)


def renamed(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    sm_scale=None,
    window_size=(-1, -1),
    logits_soft_cap=0.0,
    slopes=None,
    return_softmax_lse=False,
):
    window = tuple(None if side == -1 else side for side in window_size)
    return canonical(
        query,
        key,
        value,
        causal=is_causal,
        scale=sm_scale,
        window=window,
        softcap=logits_soft_cap or None,
        alibi_slopes=slopes,
        bias=attn_mask,
        return_lse=return_softmax_lse,
    )


def bshd(q, k, v, *, causal=False, return_lse=False):
    assert q.shape[1:3] == (LQ, HQ)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = canonical(q, k, v, causal=causal, return_lse=True)
    out = out.transpose(1, 2)
    return (out, lse) if return_lse else out


OPTIONS = [
    {},
    {"causal": True},
    {"scale": 0.3},
    {"window": (2, 1)},
    {"window": (None, 1)},
    {"window": (3, None), "causal": True},
    {"softcap": 0.7, "alibi_slopes": SLOPES, "bias": BIAS, "causal": True},
    {"bias": MASK},
]


def case_name(value):
    return "+".join(value) or "plain" if isinstance(value, dict) else None
