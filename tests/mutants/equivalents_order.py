"""Equivalents that do the same arithmetic in another order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from pytest_flashattn.features import FEATURES
from pytest_flashattn.support import Support

from .core import INF, Core, Problem
from .equivalents_registry import equivalent
from .split import SplitCore

EVERYTHING = frozenset(FEATURES)
LN2 = math.log(2)
State = tuple[Tensor, Tensor, Tensor]


@equivalent("reverse_keys")
class ReverseKeys(Core):
    """Key tiles from the last to the first, as FlashAttention-2 visits them."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        return list(super().key_tiles(p, i))[::-1]


@equivalent("small_tiles")
class SmallTiles(Core):
    """Tiles of 16 x 32."""

    block_q, block_k = 16, 32


@equivalent("large_tiles")
class LargeTiles(Core):
    """Tiles of 128 x 176, neither of them equal nor a power of two."""

    block_q, block_k = 128, 176


@equivalent("random_order")
class RandomOrder(Core):
    """Key tiles in another order at every call, and declared as not deterministic."""

    __flashattn__ = Support(features=EVERYTHING, deterministic=False)

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        return self.random.sample(tiles, len(tiles))


@equivalent("split_kv")
class SplitKv(SplitCore):
    """Up to 64 rows: the keys in four splits, some of them empty, merged by their log-sum-exp."""

    most_rows = 64


@equivalent("sink_first")
class SinkFirst(Core):
    """The running maximum and sum start with the sink instead of ending with it."""

    def start(self, p: Problem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, total, acc = super().start(p, q)
        return (m, total, acc) if p.sinks is None else (self.sink_logit(p, m).clone(), torch.ones_like(m), acc)

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return m, total, acc


@equivalent("split_by_batch")
class SplitByBatch(SplitCore):
    """The number of splits depends on the batch: the bits of a row change with its neighbours, its value does not."""

    most_rows = 64

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        self.splits = 1 + len(p.q)
        return super().forward(p)


@equivalent("alternating_halves")
class AlternatingHalves(Core):
    """Every other key tile on its own, both parts merged by their log-sum-exp, rows without keys among them."""

    tiles_of: int | None = None

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        return tiles if self.tiles_of is None else tiles[self.tiles_of :: 2]

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        if p.sinks is not None:
            return super().forward(p)
        parts = []
        for self.tiles_of in (0, 1):
            parts.append(super().forward(replace(p, q=p.q.float())))
        self.tiles_of = None
        o, lse = (torch.stack(x) for x in zip(*parts, strict=True))
        whole = lse.logsumexp(0)
        weights = torch.exp(lse - whole.masked_fill(whole == -INF, 0))
        return (weights[..., None] * o).sum(0).to(p.q.dtype), whole


@equivalent("visits_everything")
class VisitsEverything(Core):
    """No tile is skipped: those that a row cannot see are masked like all others."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        return range(0, p.lk, self.block_k)


@equivalent("skips_hidden_tiles")
class SkipsHiddenTiles(Core):
    """Tiles that the mask hides as a whole are not visited, as with a block mask."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        return [j for j in super().key_tiles(p, i) if bool(self.visible(p, i, j).any())]


@equivalent("backward_other_tiles")
class BackwardOtherTiles(Core):
    """The backward has tiles of its own."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
        self.block_q, self.block_k = 32, 128
        try:
            return super().backward(p, o, lse, do, dlse)
        finally:
            self.block_q, self.block_k = Core.block_q, Core.block_k


@equivalent("sixteen_at_a_time")
class SixteenAtATime(Core):
    """Products add up 16 terms an instruction, one instruction after the other, as tensor cores do."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        s = q[..., :16] @ k[..., :16].mT
        for d in range(16, q.shape[-1], 16):
            s = s + q[..., d : d + 16] @ k[..., d : d + 16].mT
        return s * p.scale

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        prob = self.rounded(p, prob)
        for j in range(0, self.block_k, 16):
            acc = acc + prob[..., j : j + 16] @ v[:, :, j : j + 16]
        return acc


@equivalent("packed_groups")
class PackedGroups(Core):
    """The query heads of a group lie in one tile, row after row, where nothing depends on a row's number or head."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        plain = not p.causal and p.window is None and p.bias is None and p.slopes is None and p.sinks is None
        hkv = p.k.shape[1]
        if not plain or p.heads == hkv:
            return super().forward(p)
        o, lse = super().forward(replace(p, q=p.q.unflatten(1, (hkv, -1)).flatten(2, 3)))
        group = p.heads // hkv
        return o.unflatten(2, (group, p.lq)).flatten(1, 2), lse.unflatten(2, (group, p.lq)).flatten(1, 2)
