"""Mutants of the diagonal, windows, masks and rows that see nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pytest_flashattn.features import FEATURES
from pytest_flashattn.support import Support

from .core import INF, Band, Core, Problem
from .registry import misread, mutant

EVERYTHING = frozenset(FEATURES)


@mutant(14, "causal")
class CausalTopLeft(Core):
    """The diagonal starts at the top left corner although the contract says bottom right."""

    def diagonal(self, p: Problem) -> int:
        self.reached |= p.lq != p.lk and (p.causal or p.window is not None or p.slopes is not None)
        return 0


@mutant(15, "causal")
class CausalBottomRight(Core):
    """The diagonal ends at the bottom right corner although the declaration says top left."""

    __flashattn__ = Support(features=EVERYTHING, alignment="top-left")

    def diagonal(self, p: Problem) -> int:
        self.reached |= p.lq != p.lk and (p.causal or p.window is not None or p.slopes is not None)
        return super().diagonal(p)


@mutant(0, "causal")
class LeakedFutureKey(Core):
    """Each row sees one key of its future."""

    def band(self, p: Problem) -> Band:
        left, right = super().band(p)
        self.reached |= p.causal
        return left, right if right is None or not p.causal else right + 1


@mutant(16, "features.window")
class WindowPlusOne(Core):
    """One key too many on the left of a window."""

    def band(self, p: Problem) -> Band:
        left, right = super().band(p)
        self.reached |= left is not None
        return left if left is None else left + 1, right


@mutant(17, "features.window")
class WindowMinusOne(Core):
    """One key too few on the left of a window."""

    def band(self, p: Problem) -> Band:
        left, right = super().band(p)
        self.reached |= bool(left)
        return left and left - 1, right


@mutant(0, "features.window")
class WindowRightIgnored(Core):
    """The right side of a window counts as unbounded unless causal says otherwise."""

    def band(self, p: Problem) -> Band:
        left, right = super().band(p)
        self.reached |= right is not None and not p.causal
        return left, right if p.causal else None


@mutant(18, "features.window")
class WindowIgnoredPastTile(Core):
    """The window is honoured in the tiles of the diagonal only."""

    def key_tiles(self, p: Problem, i: int) -> Iterable[int]:
        return super().key_tiles(replace(p, window=p.window and (None, p.window[1])), i)

    def in_band(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        if p.window and p.window[0] is not None and int(keys[-1]) < int(rows[0]) + self.diagonal(p):
            self.reached = True
            p = replace(p, window=None)
        return super().in_band(p, rows, keys)


@mutant(95, "features.window")
class IgnoreWindow(Core):
    """A window is accepted and has no effect."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= p.window is not None
        return replace(p, window=None)


@mutant(19, "features.mask")
class MaskTransposed(Core):
    """The mask is read as (key, query)."""

    def bias_tile(self, p: Problem, i: int, j: int) -> Tensor:
        assert p.bias is not None
        self.reached = True
        full = p.bias.expand(*p.bias.shape[:2], p.lq, p.lk)
        return super().bias_tile(replace(p, bias=full.reshape(*full.shape[:2], p.lk, p.lq).mT), i, j)


@mutant(20, "features.mask")
class MaskBroadcastWrong(Core):
    """A broadcast mask or bias is read with the strides of a full one."""

    def bias_tile(self, p: Problem, i: int, j: int) -> Tensor:
        assert p.bias is not None
        shape = (p.q.shape[0], p.heads, p.lq, p.lk)
        self.reached |= p.bias.shape != shape
        full = misread(p.bias.flatten()[torch.arange(math.prod(shape)) % p.bias.numel()]).view(shape)
        return super().bias_tile(replace(p, bias=full), i, j)


@mutant(21, "features.bias")
class MaskLastdimAssert(Core):
    """A mask or bias that is broadcast over the keys is refused."""

    def prepare(self, p: Problem) -> Problem:
        if p.bias is not None and p.bias.shape[-1] != p.lk:
            self.reached = True
            raise RuntimeError("(*bias): last dimension must be contiguous")
        return p


@mutant(0, "features.mask")
class MaskInverted(Core):
    """True means hidden."""

    def prepare(self, p: Problem) -> Problem:
        if p.bias is None or p.bias.dtype != torch.bool:
            return p
        self.reached = True
        return replace(p, bias=~p.bias)


@mutant(97, "features.mask")
class IgnoreKeyPadding(Core):
    """A key padding mask, one row for all queries, is accepted and has no effect."""

    def prepare(self, p: Problem) -> Problem:
        if p.bias is None or p.bias.dtype != torch.bool or p.bias.shape[1:3] != (1, 1):
            return p
        self.reached = True
        return replace(p, bias=None)


@mutant(61, "features.mask")
class GqaMaskReindex(Core):
    """The row of the mask is divided by the group although heads are not packed."""

    def bias_tile(self, p: Problem, i: int, j: int) -> Tensor:
        assert p.bias is not None
        group = p.heads // p.k.shape[1]
        self.reached |= group > 1 and p.bias.shape[2] > 1
        full = p.bias.expand(*p.bias.shape[:2], p.lq, p.lk)[:, :, torch.arange(p.lq) // group]
        return super().bias_tile(replace(p, bias=full), i, j)


@mutant(22, "backward")
class BwdSkipsPartialBlock(Core):
    """The backward visits only tiles that are visible as a whole."""

    def backward_tiles(self, p: Problem, i: int) -> Iterable[int]:
        for j in super().backward_tiles(p, i):
            seen = self.visible(p, i, j)[..., : p.lq - i, : p.lk - j]
            if bool(seen.all()):
                yield j
            else:
                self.reached = True


class _EmptyRows(Core):
    def store(self, p: Problem, o: Tensor, lse: Tensor, i: int, o_tile: Tensor, lse_tile: Tensor) -> None:
        empty = lse_tile == -INF
        self.reached |= bool(empty[:, :, : p.lq - i].any())
        filled = torch.where(empty[..., None], self.filling(p, o, i), o_tile)
        super().store(p, o, lse, i, filled, lse_tile)

    def filling(self, p: Problem, o: Tensor, i: int) -> Tensor:
        """What rows without keys hold, broadcastable to (B, H, Bq, Dv)."""
        raise NotImplementedError


@mutant(23, "causal")
class EmptyRowNan(_EmptyRows):
    """A row that sees no key gives 0 / 0."""

    def filling(self, p: Problem, o: Tensor, i: int) -> Tensor:
        return torch.tensor(math.nan)


@mutant(24, "causal")
class EmptyRowMean(_EmptyRows):
    """A row that sees no key returns mean(V)."""

    def filling(self, p: Problem, o: Tensor, i: int) -> Tensor:
        return p.v.float().mean(2, keepdim=True)[:, self.head_map(p)]


@mutant(25, "causal")
class EmptyRowUnwritten(_EmptyRows):
    """A row that sees no key is left as it was allocated."""

    def filling(self, p: Problem, o: Tensor, i: int) -> Tensor:
        old = o[:, :, i : i + self.block_q].float()
        return F.pad(old, (0, 0, 0, self.block_q - old.shape[2]))


@mutant(26, "shapes")
class EmptyRowBwdNan(Core):
    """A row that sees no key is right forward, and NaN backward: exp(-inf - -inf)."""

    def load_lse(self, lse: Tensor, i: int) -> Tensor:
        self.reached |= bool((lse == -INF).any())
        return self.load(lse[..., None], i, self.block_q)


@mutant(27, "features.window")
class FirstTileMaskedNan(Core):
    """NaN when the first tile that a row visits is all masked: -inf - -inf."""

    def base(self, m: Tensor) -> Tensor:
        return m

    def store(self, p: Problem, o: Tensor, lse: Tensor, i: int, o_tile: Tensor, lse_tile: Tensor) -> None:
        self.reached |= bool(lse_tile[:, :, : p.lq - i].isnan().any())  # rows beyond Lq are NaN at all times
        super().store(p, o, lse, i, o_tile, lse_tile)


@mutant(0, "causal.future_keys_have_no_effect")
class MaxBeforeMask(Core):
    """The running maximum is taken before the mask: large scores of hidden keys underflow the visible ones."""

    def masked(self, p: Problem, s: Tensor, seen: Tensor) -> Tensor:
        self.peak = s.amax(-1, keepdim=True)
        return super().masked(p, s, seen)

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.reached |= bool((self.peak > s.amax(-1, keepdim=True)).any())
        m_new = torch.maximum(m, self.peak)
        prob, rescale = self.exp(s - m_new), self.exp(m - m_new)
        return m_new, total * rescale + prob.sum(-1, keepdim=True), self.accumulate(p, acc * rescale, prob, v)
