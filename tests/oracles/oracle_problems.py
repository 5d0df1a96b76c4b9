"""Problems that between them use every option of AttentionSpec, and a third implementation, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from oracles import AttentionSpec, Segments


@dataclass
class Problem:
    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    do: Tensor
    dlse: Tensor


def problem(b=2, hq=4, hkv=2, lq=17, lk=23, d=8, dv=8, *, seed=0, dtype=torch.float64, **options: Any) -> Problem:
    """A random problem; an option that is a function makes its value from a generator of random tensors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, do = (normal(*s).to(dtype) for s in ((b, hq, lq, d), (b, hkv, lk, d), (b, hkv, lk, dv), (b, hq, lq, dv)))
    options = {name: x(normal) if callable(x) else x for name, x in options.items()}
    return Problem(q, k, v, AttentionSpec(**options), do, normal(b, hq, lq))


def hidden(*shape: int) -> Callable[..., Tensor]:
    """A mask that hides about half, and all of every fifth row."""

    def mask(normal: Callable[..., Tensor]) -> Tensor:
        seen = normal(*shape) > 0
        if shape[-2] > 1:
            seen[..., ::5, :] = False
        return seen

    return mask


def with_holes(normal: Callable[..., Tensor]) -> Tensor:
    bias = normal(1, 4, 17, 23)
    return bias.masked_fill(bias > 1, -torch.inf)


_PACKED = {"cu_q": (0, 5, 5, 12, 15), "cu_k": (0, 7, 10, 10, 20)}

PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mha": {"hkv": 4},
    "mqa": {"hkv": 1},
    "dv-wider": {"dv": 12},
    "dv-narrower": {"dv": 3},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "alignment": "top-left"},
    "causal-more-queries": {"causal": True, "lq": 23, "lk": 9},
    "causal-more-queries-top-left": {"causal": True, "lq": 23, "lk": 9, "alignment": "top-left"},
    "one-query": {"lq": 1, "causal": True},
    "one-key": {"lk": 1},
    "scale-negative": {"scale": -0.7},
    "scale-zero": {"scale": 0.0},
    "scale-large": {"scale": 20.0},
    "window": {"window": (3, 2)},
    "window-left-causal": {"window": (4, None), "causal": True},
    "window-right": {"window": (None, 1), "alignment": "top-left"},
    "window-diagonal-only": {"window": (0, 0), "lq": 23, "lk": 17},
    "softcap": {"softcap": 1.5},
    "softcap-saturated": {"softcap": 0.5, "scale": 10.0},
    "alibi": {"alibi_slopes": lambda normal: normal(4).abs(), "causal": True},
    "alibi-per-batch": {"alibi_slopes": lambda normal: normal(2, 4), "lq": 23, "lk": 17},
    "bias": {"bias": lambda normal: normal(2, 4, 17, 23)},
    "bias-2d": {"bias": lambda normal: normal(17, 23)},
    "bias-per-key": {"bias": lambda normal: normal(2, 1, 1, 23)},
    "bias-per-row": {"bias": lambda normal: normal(4, 17, 1)},
    "bias-scalar": {"bias": lambda normal: normal(1)},
    "bias-with-holes": {"bias": with_holes},
    "mask": {"mask": hidden(2, 4, 17, 23)},
    "mask-padding": {"mask": hidden(2, 1, 1, 23)},
    "mask-rows": {"mask": hidden(17, 1)},
    "mask-nothing-visible": {"mask": torch.zeros(1, 1, 1, 23, dtype=torch.bool)},
    "sinks": {"sinks": lambda normal: normal(4), "causal": True},
    "sinks-empty-rows": {"sinks": lambda normal: normal(4), "causal": True, "lq": 23, "lk": 9},
    "sinks-dominant": {"sinks": lambda normal: normal(4) + 15},
    "segments": {"segments": Segments(**_PACKED)},
    "segments-causal": {"segments": Segments(**_PACKED), "causal": True},
    "segments-window-top-left": {"segments": Segments(**_PACKED), "window": (2, 1), "alignment": "top-left"},
    "segments-alibi": {"segments": Segments(**_PACKED), "alibi_slopes": lambda normal: normal(4), "causal": True},
    "segments-none": {"segments": Segments((0,), (0,))},
    "everything": {
        "scale": 0.6,
        "causal": True,
        "window": (9, 3),
        "softcap": 2.0,
        "alibi_slopes": lambda normal: normal(4).abs(),
        "bias": lambda normal: normal(1, 4, 17, 23),
        "mask": hidden(2, 1, 17, 23),
        "sinks": lambda normal: normal(4),
        "segments": Segments(**_PACKED),
    },
    "empty-batch": {"b": 0, "sinks": lambda normal: normal(4)},
    "empty-queries": {"lq": 0, "causal": True, "bias": lambda normal: normal(4, 1, 23)},
    "empty-keys": {"lk": 0, "causal": True, "softcap": 1.0},
    "empty-keys-sinks": {"lk": 0, "sinks": lambda normal: normal(4)},
}

every_problem = pytest.mark.parametrize("name", PROBLEMS)


def sees(spec: AttentionSpec, i: int, j: int, lq: int, lk: int) -> tuple[bool, int]:
    """Whether row i sees key j but for mask and bias, and their distance, in plain Python."""
    begin_q, end_q, begin_k, end_k = 0, lq, 0, lk
    if spec.segments is not None:
        cu = spec.segments
        mine = [n for n in range(len(cu.cu_q) - 1) if cu.cu_q[n] <= i < cu.cu_q[n + 1]]
        if not mine or not cu.cu_k[mine[0]] <= j < cu.cu_k[mine[0] + 1]:
            return False, 0
        begin_q, end_q = cu.cu_q[mine[0] : mine[0] + 2]
        begin_k, end_k = cu.cu_k[mine[0] : mine[0] + 2]
    row, key = i - begin_q, j - begin_k
    if spec.alignment == "bottom-right":
        row += (end_k - begin_k) - (end_q - begin_q)
    left, right = spec.window or (None, None)
    seen = (left is None or key >= row - left) and (right is None or key <= row + right)
    return seen and (not spec.causal or key <= row), abs(row - key)


def row_by_row(p: Problem) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """o, lse and gradients by autograd, each row from the keys it sees and nothing else; empty rows by definition."""
    spec = p.spec
    q, k, v = (x.detach().clone().requires_grad_() for x in (p.q, p.k, p.v))
    leaves = {"dq": q, "dk": k, "dv": v}
    extra = {"dbias": spec.bias, "dsinks": spec.sinks}
    leaves |= {name: x.clone().requires_grad_() for name, x in extra.items() if x is not None}
    (b, hq, lq, d), (_, hkv, lk, _) = q.shape, k.shape
    bias, mask = ("dbias" in leaves and leaves["dbias"].expand(b, hq, lq, lk)), spec.mask
    mask = None if mask is None else mask.expand(b, hq, lq, lk)
    scale = d**-0.5 if spec.scale is None else spec.scale
    o, lse, loss = torch.zeros_like(p.do), torch.full_like(p.dlse, -torch.inf), torch.zeros((), dtype=torch.float64)
    for n in range(b):
        for h in range(hq):
            for i in range(lq):
                seen = [(j, far) for j in range(lk) for ok, far in [sees(spec, i, j, lq, lk)] if ok]
                seen = [(j, far) for j, far in seen if mask is None or mask[n, h, i, j]]
                seen = [(j, far) for j, far in seen if bias is False or bias[n, h, i, j] > -torch.inf]
                keys = torch.tensor([j for j, _ in seen], dtype=torch.long)
                s = (k[n, h * hkv // hq, keys] * q[n, h, i]).sum(-1) * scale
                if spec.softcap is not None:
                    s = spec.softcap * torch.tanh(s / spec.softcap)
                if spec.alibi_slopes is not None:
                    slope = spec.alibi_slopes.expand(b, hq)[n, h]
                    s = s - slope * torch.tensor([far for _, far in seen], dtype=torch.float64)
                if bias is not False:
                    s = s + bias[n, h, i, keys]
                logits = torch.cat([s, leaves["dsinks"][h : h + 1]]) if "dsinks" in leaves else s
                if not len(logits):
                    continue
                row_lse = torch.logsumexp(logits, 0)
                row_o = torch.softmax(logits, 0)[: len(keys)] @ v[n, h * hkv // hq, keys]
                o[n, h, i], lse[n, h, i] = row_o.detach(), row_lse.detach()
                loss = loss + row_o @ p.do[n, h, i] + row_lse * p.dlse[n, h, i]
    if loss.requires_grad:
        loss.backward()
    return o, lse, {name: x.grad if x.grad is not None else torch.zeros_like(x) for name, x in leaves.items()}


def assert_agree(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-12) -> None:
    """Equal to the tolerance, relative to the largest element (at least 1); infinities in the same places."""
    assert found.shape == expected.shape, what
    assert found.dtype == torch.float64, what
    assert not found.isnan().any(), what
    assert torch.equal(found.isinf(), expected.isinf()), what
    finite = ~expected.isinf()
    size = max(1.0, float(expected[finite].abs().max())) if finite.any() else 1.0
    off = float((found - expected)[finite].abs().max()) if finite.any() else 0.0
    assert off <= tolerance * size, f"{what}: {off:.2e} off, natural size {size:.2e}"
