"""Split keys (flash decoding): parts of the keys on their own, joined by their log-sum-exp."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .core import Core, Problem


class SplitCore(Core):
    """Few query rows against many keys: four splits in whole tiles, some of which may be empty. Honest."""

    splits = 4
    most_rows = 1

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        plain = p.window is None and p.bias is None and p.slopes is None and p.sinks is None
        if not plain or p.lq > self.most_rows or (p.causal and p.lq > 1) or p.lk <= self.block_k:
            return super().forward(p)
        size = -(-p.lk // self.splits // self.block_k) * self.block_k
        # float32 inputs: the parts are joined before the output is rounded, as the kernels do.
        whole = replace(p, q=p.q.float(), causal=False)
        cuts = [slice(n * size, (n + 1) * size) for n in range(self.splits)]
        parts = [self.part(replace(whole, k=p.k[:, :, c], v=p.v[:, :, c]), p.q.dtype) for c in cuts]
        o, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        weights = self.weights(lse, torch.tensor([x.shape[2] for x in (p.k[:, :, c] for c in cuts)]))
        return (weights[..., None] * o).sum(0).to(p.q.dtype), lse.logsumexp(0)

    def part(self, p: Problem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """float32 (o, lse) of one split; P is rounded to `dtype`, that of the call."""
        self.p_dtype = dtype
        try:
            return super().forward(p)
        finally:
            self.p_dtype = None

    p_dtype: torch.dtype | None = None

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        return x.to(self.p_dtype).float() if self.p_dtype else super().rounded(p, x)

    def weights(self, lse: Tensor, counts: Tensor) -> Tensor:
        """The share of each split (splits, B, H, Lq) in the denominator."""
        return lse.softmax(0).nan_to_num(nan=0.0)
