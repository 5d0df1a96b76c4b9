"""Mutants of softcap, ALiBi, bias, sinks, scale: accepted, and wrong."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .core import Core, Problem
from .registry import mutant

Gradients = dict[str, Tensor]


@mutant(96, "numerics")
class IgnoreScale(Core):
    """scale is accepted, and D^-0.5 used."""

    def prepare(self, p: Problem) -> Problem:
        usual = p.q.shape[-1] ** -0.5
        self.reached |= p.scale != usual
        return replace(p, scale=usual)


@mutant(104, "features.softcap")
class SoftcapWrongFormula(Core):
    """s * tanh(s) instead of c * tanh(s / c)."""

    def cap(self, p: Problem, s: Tensor) -> tuple[Tensor, Tensor]:
        self.reached = True
        t = torch.tanh(s)
        return s * t, t + s * (1 - t * t)


@mutant(105, "features.softcap")
class SoftcapBwdMissing(Core):
    """The cap is left out of the backward."""

    def dcap(self, ds: Tensor, slope: Tensor) -> Tensor:
        self.reached = True
        return ds


@mutant(0, "features.softcap")
class SoftcapAfterMask(Core):
    """The cap is applied after the mask: a hidden key gets -c, not -inf."""

    def scores(self, p: Problem, q: Tensor, k: Tensor, i: int, j: int) -> tuple[Tensor, Tensor | None]:
        s, slope = super().scores(p, q, k, i, j)
        rows, keys = self.positions(i, j)
        if p.softcap is not None:
            inside = self.inside(p, rows, keys)
            self.reached |= bool(((s == -torch.inf) & inside).any())
            s = s.clamp_min(-p.softcap).masked_fill(~inside, -torch.inf)
        return s, slope


@mutant(0, "features.softcap")
class SoftcapAfterAlibi(Core):
    """ALiBi is added before the cap instead of after it."""

    def scores(self, p: Problem, q: Tensor, k: Tensor, i: int, j: int) -> tuple[Tensor, Tensor | None]:
        if p.softcap is None or p.slopes is None:
            return super().scores(p, q, k, i, j)
        self.reached = True
        s, slope = self.cap(p, self.scaled(p, q, k) - self.alibi(p, i, j))
        return self.masked(p, s, self.visible(p, i, j)), slope


@mutant(106, "features.sinks")
class SinkDropped(Core):
    """The sink is missing in the denominator."""

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.reached = True
        return m, total, acc


@mutant(107, "features.sinks")
class SinkRowModHead(Core):
    """Row i uses the sink of head i mod H."""

    def sink_logit(self, p: Problem, like: Tensor) -> Tensor:
        assert p.sinks is not None
        self.reached |= p.heads > 1
        return p.sinks.float()[torch.arange(like.shape[2]) % p.heads, None].expand_as(like)


@mutant(108, "features.sinks")
class SinkGradBatch(Core):
    """The gradient of the sinks comes from the last batch element only."""

    def dsinks(self, p: Problem, lse: Tensor, delta: Tensor) -> Tensor:
        self.reached |= len(lse) > 1
        return super().dsinks(p, lse[-1:], delta[-1:])


@mutant(0, "features.sinks")
class SinkScaled(Core):
    """The sink is multiplied by the scale like a score."""

    def sink_logit(self, p: Problem, like: Tensor) -> Tensor:
        self.reached = True
        return super().sink_logit(p, like) * p.scale


@mutant(0, "features.sinks")
class SinkByKvHead(Core):
    """Grouped heads share the sink of their kv head."""

    def sink_logit(self, p: Problem, like: Tensor) -> Tensor:
        assert p.sinks is not None
        self.reached |= p.heads != p.k.shape[1]
        return p.sinks.float()[self.head_map(p), None, None].expand_as(like)


@mutant(0, "features.sinks")
class LseWithoutSink(Core):
    """The log-sum-exp that is returned leaves the sink out."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        o, lse = super().run(p)
        if p.sinks is None:
            return o, lse
        self.reached = True
        return o, lse + torch.log1p(-torch.exp(p.sinks[:, None] - lse))


@mutant(0, "features.sinks")
class SinkSoftcapped(Core):
    """The sink passes through the softcap."""

    def sink_logit(self, p: Problem, like: Tensor) -> Tensor:
        sink = super().sink_logit(p, like)
        if p.softcap is None:
            return sink
        self.reached = True
        return self.cap(p, sink)[0]


@mutant(109, "features.alibi")
class AlibiSlopeOffByOne(Core):
    """Slopes are shifted by one head."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= p.slopes is not None and p.heads > 1
        return p if p.slopes is None else replace(p, slopes=p.slopes.roll(1))


@mutant(110, "features.alibi")
class AlibiLocalHeads(Core):
    """Slopes are computed from the number of kv heads."""

    def prepare(self, p: Problem) -> Problem:
        self.reached |= p.slopes is not None and p.heads != p.k.shape[1]
        return p if p.slopes is None else replace(p, slopes=p.slopes[self.head_map(p)])


@mutant(111, "features.alibi")
class AlibiTail(Core):
    """ALiBi counts from the start of the tile in the last, partial one."""

    def alibi(self, p: Problem, i: int, j: int) -> Tensor:
        if j + self.block_k <= p.lk or j == 0:
            return super().alibi(p, i, j)
        self.reached = True
        return super().alibi(p, i, 0)


@mutant(0, "features.alibi")
class AlibiTopLeft(Core):
    """Distances are counted from the top left diagonal."""

    def alibi(self, p: Problem, i: int, j: int) -> Tensor:
        self.reached |= p.lq != p.lk
        return super().alibi(p, i - self.diagonal(p), j)


@mutant(0, "features.alibi")
class AlibiOneSided(Core):
    """Keys right of the diagonal get a bonus instead of a penalty: the absolute value is missing."""

    def alibi(self, p: Problem, i: int, j: int) -> Tensor:
        assert p.slopes is not None
        rows, keys = self.positions(i, j)
        self.reached |= bool((keys > rows + self.diagonal(p)).any())
        return p.slopes[:, None, None] * (rows + self.diagonal(p) - keys)


@mutant(0, "features.bias")
class BiasScaled(Core):
    """The bias is added before scaling."""

    def bias_tile(self, p: Problem, i: int, j: int) -> Tensor:
        tile = super().bias_tile(p, i, j)
        if tile.dtype == torch.bool:
            return tile
        self.reached = True
        return tile * p.scale


@mutant(0, "features.bias")
class BiasMinusInfNan(Core):
    """An additive bias of -inf gives NaN."""

    def bias_tile(self, p: Problem, i: int, j: int) -> Tensor:
        tile = super().bias_tile(p, i, j)
        if tile.dtype == torch.bool or not bool((tile == -torch.inf).any()):
            return tile
        self.reached = True
        return tile + 0 * tile


@mutant(101, "features.bias")
class BiasGradNone(Core):
    """A bias that needs a gradient gets none."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        if p.bias is None:
            return super().run(p)
        self.reached |= p.bias.requires_grad
        return super().run(replace(p, bias=p.bias.detach()))


@mutant(0, "features.bias")
class BiasGradNoneWithoutScores(BiasGradNone):
    """A problem without scores is answered before the bias enters: it gets no gradient instead of zeros."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        return super().run(p) if p.lq * p.lk == 0 else Core.run(self, p)


@mutant(112, "features.bias")
class BiasGradNotReduced(Core):
    """The gradient of a bias that is broadcast over heads comes from the last head only."""

    def add_dbias(self, dbias: Tensor, ds: Tensor, i: int, j: int) -> None:
        if dbias.shape[1] == 1 and ds.shape[1] > 1:
            self.reached = True
            ds = ds[:, -1:]
        super().add_dbias(dbias, ds, i, j)


@mutant(0, "features.bias")
class BiasGradScaled(Core):
    """The gradient of the bias is multiplied by the scale."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        found = super().backward(p, o, lse, do, dlse)
        if "bias" in found:
            self.reached = True
            found["bias"] *= p.scale
        return found


@mutant(100, "features.softcap")
class PositionalShift(Core):
    """The softcap is passed by position to a kernel that has none, and arrives as the slopes of ALiBi."""

    def prepare(self, p: Problem) -> Problem:
        if p.softcap is None:
            return p
        self.reached = True
        return replace(p, softcap=None, slopes=torch.full((p.heads,), p.softcap))
