"""A small implementation of the canonical call, in plain PyTorch: put your kernel in its place."""

import torch

from pytest_flashattn import Support


def attention(q, k, v, *, causal=False, scale=None, return_lse=False):
    """q (B, Hq, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv); out (B, Hq, Lq, Dv), or (out, lse (B, Hq, Lq))."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1).float() for x in (k, v))
    scores = q.float() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:  # bottom-right: the last query sees all keys
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(keys - rows + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()  # a row that sees no key: p = 0
    out = (p @ v).to(q.dtype)
    return (out, lse) if return_lse else out


# Without this line the features are read off the signature. With it, they are what it says, and so is the arithmetic.
attention.__flashattn__ = Support(
    features={"causal", "cross", "gqa", "dv", "scale", "lse", "backward", "lse_grad"},
    p_dtype="fp32",  # P stays in fp32 before P @ V: the bound is derived for that, and is tighter
)
