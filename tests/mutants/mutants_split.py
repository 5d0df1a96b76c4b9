"""Mutants of split keys: parts of the keys on their own, joined wrongly."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .core import Core, Problem
from .registry import mutant
from .split import SplitCore

Output = tuple[Tensor, Tensor]


@mutant(90, "causal")
class SplitCombineWrong(SplitCore):
    """Splits are weighted by their number of keys, not by their log-sum-exp."""

    def weights(self, lse: Tensor, counts: Tensor) -> Tensor:
        self.reached = True
        share = (counts / counts.sum()).to(lse.dtype)
        return share[:, None, None, None].expand_as(lse)


@mutant(91, "causal")
class SplitEmptyChunkNan(SplitCore):
    """An empty split gives 0 / 0, and NaN survives its weight of zero."""

    def part(self, p: Problem, dtype: torch.dtype) -> Output:
        o, lse = super().part(p, dtype)
        self.reached |= p.lk == 0
        return (o, lse) if p.lk else (o * math.nan, lse)


@mutant(57, "causal")
class LseNeededForMerge(SplitCore):
    """The log-sum-exp of the splits is only stored when the caller asks for it; the merge reads zeros otherwise."""

    @functools.wraps(Core.__call__)  # its parameters are its declaration
    def __call__(self, *args: Any, **options: Any) -> Any:
        self.stored = bool(options.get("return_lse"))
        return super().__call__(*args, **options)

    def weights(self, lse: Tensor, counts: Tensor) -> Tensor:
        self.reached |= not self.stored
        return super().weights(lse if self.stored else torch.zeros_like(lse), counts)


@mutant(31, "causal")
class MergeEmptyNan(Core):
    """Every other tile on its own, then both merged: a row that sees no key gets the weights exp(-inf - -inf)."""

    tiles_of: int | None = None

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        return tiles if self.tiles_of is None else tiles[self.tiles_of :: 2]

    def forward(self, p: Problem) -> Output:
        if p.sinks is not None:
            return super().forward(p)
        parts = []
        for self.tiles_of in (0, 1):
            parts.append(super().forward(replace(p, q=p.q.float())))
        self.tiles_of = None
        o, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        peak = lse.amax(0)
        self.reached |= bool((peak == -math.inf).any())
        weights = torch.exp(lse - peak)
        total = weights.sum(0)
        return ((weights / total)[..., None] * o).sum(0).to(p.q.dtype), peak + total.log()


@mutant(71, "shapes")
class CombineRowPitch(SplitCore):
    """Splits are joined into (B, L, H, D) memory, whose rows are taken to lie D apart."""

    most_rows = 64

    def weights(self, lse: Tensor, counts: Tensor) -> Tensor:
        self.joined = True
        return super().weights(lse, counts)

    def forward(self, p: Problem) -> Output:
        self.joined = False
        o, lse = super().forward(p)
        if not self.joined or p.lq == 1 or p.heads == 1:
            return o, lse
        self.reached = True
        batch, heads, rows, dim = o.shape
        memory = o.new_empty(batch, rows, heads, dim)
        for h in range(heads):
            memory.as_strided((batch, rows, dim), (rows * heads * dim, dim, 1), h * dim).copy_(o[:, h])
        return memory.transpose(1, 2), lse
