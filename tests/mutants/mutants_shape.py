"""Mutants of tails, dims, heads and lengths."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .core import INF, Core, Problem
from .registry import mutant


@mutant(1, "shapes")
class NoKvTailMask(Core):
    """Padded keys of the last tile score 0 and enter the denominator."""

    def inside(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        self.reached |= int(keys[-1]) >= p.lk
        return (rows < p.lq).expand(-1, len(keys))


@mutant(3, "shapes")
class NoQTailGuard(Core):
    """The last Q tile writes past the end of its head, over the first rows of the next one."""

    def store(self, p: Problem, o: Tensor, lse: Tensor, i: int, o_tile: Tensor, lse_tile: Tensor) -> None:
        super().store(p, o, lse, i, o_tile, lse_tile)
        spill = o_tile[:, :, p.lq - i :].flatten(0, 1)[:-1, : p.lq]
        if spill.numel():
            self.reached = True
            o.view(-1, *o.shape[2:])[1:, : spill.shape[1]] = spill


@mutant(4, "shapes")
class KvLoopFromLq(Core):
    """Loop bound and mask of the keys computed from Lq."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        self.reached |= p.lq != p.lk
        return [j for j in super().key_tiles(p, i) if j < p.lq]

    def inside(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys < p.lq) & (rows < p.lq)


@mutant(5, "shapes")
class ShortSeqFail(Core):
    """Raises when a length is below 16, the smallest tile of a tensor core."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        if 0 < min(p.lq, p.lk) < 16:
            self.reached = True
            raise RuntimeError("block pointers need at least 16 rows")
        return super().forward(p)


@mutant(6, "forward")
class HardcodeD64(Core):
    """Only the first 64 head dims are used."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        self.reached |= q.shape[-1] > 64
        return super().scaled(p, q[..., :64], k[..., :64])


@mutant(7, "forward")
class DPow2Only(Core):
    """D that is no power of two is padded with the start of the next row instead of zeros."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        if pad := (1 << (q.shape[-1] - 1).bit_length()) - q.shape[-1]:
            self.reached = True
            q, k = (torch.cat([x, x.roll(-1, 2)[..., :pad]], -1) for x in (q, k))
        return super().scaled(p, q, k)


@mutant(8, "features.value_dim")
class VDimEqQk(Core):
    """The columns of V and O are counted by the head dim of Q and K."""

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        self.reached |= acc.shape[-1] > p.q.shape[-1]
        acc[..., p.q.shape[-1] :] = 0
        return super().epilogue(p, m, total, acc)


@mutant(9, "forward")
class LayoutSwap(Core):
    """Memory read as (B, L, H, D): right only when L == H."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= any(min(x.shape[1:3]) > 1 for x in (p.q, p.k))
        return replace(p, **{n: getattr(p, n).transpose(1, 2).reshape(getattr(p, n).shape) for n in "qkv"})


@mutant(11, "forward")
class LongCtxPathWrong(Core):
    """The path for 16k keys and more loses its last whole tile."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        if p.lk < 16384:
            return tiles
        self.reached = True
        return tiles[:-1]


@mutant(12, "forward")
class D160ConfigWrong(Core):
    """Wrong only for head dims 129 to 160, which get a configuration of their own."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        if 128 < q.shape[-1] <= 160:
            self.reached = True
            return super().scaled(p, q[..., :128], k[..., :128])
        return super().scaled(p, q, k)


@mutant(58, "gqa")
class GqaModulo(Core):
    """Query head h reads kv head h mod Hkv."""

    def head_map(self, p: Problem) -> Tensor:
        read = torch.arange(p.heads) % p.k.shape[1]
        self.reached |= not torch.equal(read, super().head_map(p))
        return read


@mutant(59, "gqa")
class GqaDivWrong(Core):
    """Query head h reads kv head h // Hkv."""

    def head_map(self, p: Problem) -> Tensor:
        hkv = p.k.shape[1]
        read = torch.arange(p.heads) if hkv == p.heads else (torch.arange(p.heads) // hkv) % hkv
        self.reached |= not torch.equal(read, super().head_map(p))
        return read


@mutant(60, "gqa")
class GqaPow2Only(Core):
    """The group is floored to a power of two: wrong for 3, 5, 6, 7 query heads a kv head."""

    def head_map(self, p: Problem) -> Tensor:
        group = p.heads // p.k.shape[1]
        floored = 1 << (group.bit_length() - 1)
        self.reached |= floored != group
        return (torch.arange(p.heads) // floored).clamp_max(p.k.shape[1] - 1)


@mutant(78, "shapes")
class Int16Seqlen(Core):
    """The number of keys is kept in 16 bits."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        self.reached |= p.lk > 32767
        stop = (p.lk + 2**15) % 2**16 - 2**15
        return [j for j in super().key_tiles(p, i) if j < stop]


@mutant(79, "shapes")
class GridLimitRaises(Core):
    """Batch and heads on one grid axis: a launch error above 65535."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        if p.q.shape[0] * p.heads > 65535:
            self.reached = True
            raise RuntimeError("CUDA error: invalid configuration argument")
        return super().forward(p)


@mutant(0, "forward")
class SkippedTile(Core):
    """The last Q tile skips its second key tile when there are three or more."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        if len(tiles) > 2 and i + self.block_q >= p.lq:
            self.reached = True
            del tiles[1]
        return tiles


@mutant(0, "forward")
class DroppedLastKey(Core):
    """The last key is never seen."""

    def inside(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        self.reached |= int(keys[0]) < p.lk <= int(keys[-1]) + 1
        return (keys < p.lk - 1) & (rows < p.lq)


@mutant(0, "shapes")
class TailTileShifted(Core):
    """The last key tile is moved back so that it fits, and its first keys count twice."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles = list(super().key_tiles(p, i))
        moved = [min(j, max(p.lk - self.block_k, 0)) for j in tiles]
        self.reached |= moved != tiles
        return moved


@mutant(53, "lse")
class LseBase2(Core):
    """The log-sum-exp is returned to base 2."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        self.reached = True
        o, lse = super().run(p)
        return o, lse * 1.4426950408889634


@mutant(54, "lse")
class LsePlusInfEmpty(Core):
    """+inf instead of -inf on rows without keys."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        o, lse = super().run(p)
        self.reached |= bool((lse == -INF).any())
        return o, lse.masked_fill(lse == -INF, INF)


@mutant(55, "lse")
class LseZeroNograd(Core):
    """The log-sum-exp is only computed when something needs a gradient."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        o, lse = super().run(p)
        if o.requires_grad:
            return o, lse
        self.reached = True
        return o, torch.zeros_like(lse)


@mutant(56, "lse")
class LseHeadPermuted(Core):
    """In decoding the rows of the log-sum-exp come in the order (group, kv head)."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        o, lse = super().run(p)
        group = p.heads // p.k.shape[1]
        if p.lq > 1 or group == 1:
            return o, lse
        self.reached = True
        return o, lse.unflatten(1, (-1, group)).transpose(1, 2).flatten(1, 2)


@mutant(10, "causal")
class TileDependent(Core):
    """The keys of a causal tile are counted by the key tile, not by the query tile: right when both are equal."""

    block_k = 32

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        tiles, right = list(super().key_tiles(p, i)), self.band(p)[1]
        if right is None:
            return tiles
        kept = [j for j in tiles if j < i + self.diagonal(p) + self.block_k + right]
        self.reached |= kept != tiles
        return kept


@mutant(33, "shapes")
class LenFloorDiv(Core):
    """The number of keys is rounded down to a multiple of 8."""

    def inside(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        self.reached |= p.lk % 8 > 0
        return (keys < p.lk // 8 * 8) & (rows < p.lq)


@mutant(62, "gqa")
class NoValidConfig(Core):
    """Packs the heads of a group into one tile: no configuration is left for lengths from block / group to block."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        if self.block_q // (p.heads // p.k.shape[1]) < p.lq < self.block_q:
            self.reached = True
            raise RuntimeError("no valid config for this problem")
        return super().forward(p)


@mutant(119, "forward")
class RaiseOutOfResources(Core):
    """The tiles of head dim 192 do not fit into shared memory."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        if p.q.shape[-1] == 192:
            self.reached = True
            raise RuntimeError("out of resource: shared memory, Required: 139776, Hardware limit: 101376")
        return super().forward(p)


_COMPILED: list[Any] = []


def _traced(q: Tensor, k: Tensor) -> Tensor:
    return q[..., 1:] @ k[..., 1:].mT if torch.compiler.is_compiling() else q @ k.mT


@mutant(13, "forward")
class CompiledDiffers(Core):
    """Wrong only when compiled: the traced product loses the first head dim."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        if not _COMPILED:  # dynamo takes seconds to import
            _COMPILED.append(torch.compile(_traced, backend="eager", dynamic=True))
        self.reached = True
        product: Tensor = _COMPILED[0](q, k)
        return product * p.scale


@mutant(83, "lse")
class AuxUninit(Core):
    """The log-sum-exp of a tile of rows that see no key is never written."""

    def store(self, p: Problem, o: Tensor, lse: Tensor, i: int, o_tile: Tensor, lse_tile: Tensor) -> None:
        unwritten = bool((lse_tile == -INF).all())
        self.reached |= unwritten
        super().store(p, o, torch.empty_like(lse) if unwritten else lse, i, o_tile, lse_tile)
