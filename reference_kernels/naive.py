"""Attention as it is written down: S and P whole, in memory. The baseline of memory, and the easiest to believe.

    S = scale Q K^T (+ the terms of scores.py)      P = softmax(S)      O = P V

Memory: B Hq Lq Lk numbers for S and as many for P. With batch 4, 32 heads and 8192 tokens each is 16 GiB in float16;
the flash kernels keep B Hq Lq numbers, 4 MiB of lse. Gradients are PyTorch's own, from the stored P.

Accumulators: S, its softmax and the sums in float32; P is rounded to the dtype of V for its product.

    python -m reference_kernels.naive           error against the float64 oracle
"""

from __future__ import annotations

import torch
from torch import Tensor


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The contract of api.flash_attention, on any device, for any head dimension and floating dtype."""
    (_, heads, lq, d), lk = q.shape, k.shape[2]
    group = heads // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    # (B, Hq, Lq, Lk)
    s = (q.float() @ k.float().mT) * (d**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    rows = torch.arange(lq, device=q.device)[:, None] + lk - lq
    distance = torch.arange(lk, device=q.device)[None, :] - rows  # (Lq, Lk), from the diagonal
    if alibi_slopes is not None:
        s = s - alibi_slopes.float()[..., None, None] * distance.abs()
    hidden = torch.zeros((), dtype=torch.bool, device=q.device)
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        s = s + bias.float()
    left, right = window or (None, None)
    if causal:
        right = 0
    if left is not None:
        hidden = hidden | (distance < -left)
    if right is not None:
        hidden = hidden | (distance > right)
    s = s.masked_fill(hidden, -torch.inf)

    # The row maximum, 0 where a row sees nothing: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
    m = s.detach().amax(-1, keepdim=True) if lk else s.new_full((*s.shape[:3], 1), -torch.inf)
    if sinks is not None:
        m = torch.maximum(m, sinks.detach().float()[:, None, None])
    m = m.masked_fill(m == -torch.inf, 0)
    p = torch.exp(s - m)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.float()[:, None, None] - m)
    empty = total == 0
    p = p / total.masked_fill(empty, 1)
    o = (p.to(v.dtype).float() @ v.float()).to(q.dtype)
    if not return_lse:
        return o
    lse = torch.log(total.masked_fill(empty, 1)) + m
    return o, lse.masked_fill(empty, -torch.inf).squeeze(-1)


if __name__ == "__main__":
    from .demo import main

    main("naive")
