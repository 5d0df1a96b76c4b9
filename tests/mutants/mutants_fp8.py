"""Mutants of FP8: descales, blocks, the scale and the format of P."""

from __future__ import annotations

import torch
from torch import Tensor

from .core import Problem
from .core_fp8 import Fp8Core, Fp8Problem, State
from .registry import mutant


@mutant(98, "fp8")
class IgnoreDescale(Fp8Core):
    """The descales are accepted and have no effect."""

    def descale(self, p: Fp8Problem, name: str, start: int, heads: Tensor) -> Tensor:
        self.reached = True
        return torch.ones(())


@mutant(98, "fp8")
class IgnoreQDescale(Fp8Core):
    """The descale of q has no effect."""

    def score_factor(self, p: Fp8Problem, i: int, j: int, heads: Tensor) -> Tensor:
        self.reached = True
        return self.descale(p, "k", j, heads)


@mutant(0, "fp8")
class DescaleTwice(Fp8Core):
    """The descale of v is applied to the values and to the output of a tile."""

    def add_values(self, p: Fp8Problem, acc: Tensor, prob: Tensor, j: int, heads: Tensor) -> Tensor:
        self.reached = True
        return acc + prob @ self.load_v(p, j, heads) * self.descale(p, "v", j, heads).square()


@mutant(99, "fp8")
class DescaleFirstHeadOnly(Fp8Core):
    """The first head's descale is used for all."""

    def of_heads(self, x: Tensor, name: str, heads: Tensor) -> Tensor:
        self.reached |= x.shape[1] > 1
        return super().of_heads(x[:, :1].expand_as(x), name, heads)


@mutant(0, "fp8")
class DescaleFirstBatchOnly(Fp8Core):
    """The first batch element's descale is used for all."""

    def of_heads(self, x: Tensor, name: str, heads: Tensor) -> Tensor:
        self.reached |= x.shape[0] > 1
        return super().of_heads(x[:1].expand_as(x), name, heads)


@mutant(0, "fp8")
class DescaleOfQByKvHead(Fp8Core):
    """The descale of q is looked up by kv head although there is one for each query head."""

    def of_heads(self, x: Tensor, name: str, heads: Tensor) -> Tensor:
        self.reached |= name == "q" and x.shape[1] == len(heads) > int(heads.max()) + 1
        return x[:, heads] if name == "q" else super().of_heads(x, name, heads)


@mutant(0, "fp8")
class DescaleBlockOffByOne(Fp8Core):
    """A block of rows gets the descale of the block before it."""

    def block_of(self, start: int, blocks: int) -> int:
        self.reached |= blocks > 1
        return max(super().block_of(start, blocks) - 1, 0)


@mutant(0, "fp8")
class DescaleOfFirstBlock(Fp8Core):
    """Every block of rows gets the descale of the first one."""

    def block_of(self, start: int, blocks: int) -> int:
        self.reached |= blocks > 1
        return 0


@mutant(116, "fp8")
class KvDequantScaleSwapped(Fp8Core):
    """The descales of k and v are swapped."""

    def descale(self, p: Fp8Problem, name: str, start: int, heads: Tensor) -> Tensor:
        self.reached |= name != "q"
        return super().descale(p, {"k": "v", "v": "k"}.get(name, name), start, heads)


@mutant(115, "fp8")
class ZeroScaleNan(Fp8Core):
    """A tile of values is scaled to the range of the format by its own maximum: 0/0 where it is all zero."""

    def load_v(self, p: Problem, j: int, heads: Tensor) -> Tensor:
        v = super().load_v(p, j, heads)
        amax = v.abs().amax((2, 3), keepdim=True)
        self.reached |= bool((amax == 0).any())
        return v / amax * amax


@mutant(0, "fp8")
class Fp8AccRescaledEachBlock(Fp8Core):
    """The running accumulator is multiplied by the descale of each tile, instead of what the tile adds."""

    def add_values(self, p: Fp8Problem, acc: Tensor, prob: Tensor, j: int, heads: Tensor) -> Tensor:
        self.reached |= bool(acc.any())
        return (acc + prob @ self.load_v(p, j, heads)) * self.descale(p, "v", j, heads)


@mutant(0, "fp8")
class E5m2ReadForE4m3(Fp8Core):
    """The bits of e4m3 are read as e5m2."""

    def load(self, x: Tensor, start: int, rows: int) -> Tensor:
        self.reached |= x.dtype == torch.float8_e4m3fn
        return super().load(x.view(torch.float8_e5m2), start, rows)


@mutant(0, "fp8")
class PWithoutItsScale(Fp8Core):
    """P is rounded to e4m3 before it is multiplied by its scale: small P are lost."""

    def quantised(self, p: Fp8Problem, prob: Tensor) -> Tensor:
        self.reached = True
        return prob.to(p.q.dtype).float() * self.p_scale


@mutant(0, "fp8")
class PScaleTooLarge(Fp8Core):
    """P is multiplied by 2^10 and saturates at 448."""

    p_scale = 1024.0

    def quantised(self, p: Fp8Problem, prob: Tensor) -> Tensor:
        self.reached |= p.q.dtype == torch.float8_e4m3fn
        return (prob * self.p_scale).clamp(max=torch.finfo(p.q.dtype).max).to(p.q.dtype).float()


@mutant(0, "fp8")
class PScaleNotUndone(Fp8Core):
    """The output is not divided by the scale of P."""

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        self.reached = True
        return super().epilogue(p, m, total, acc * self.p_scale)


@mutant(0, "fp8")
class PInE5m2(Fp8Core):
    """P is rounded to e5m2 where e4m3 is declared."""

    def quantised(self, p: Fp8Problem, prob: Tensor) -> Tensor:
        self.reached |= p.q.dtype == torch.float8_e4m3fn
        return (prob * self.p_scale).to(torch.float8_e5m2).float()


@mutant(0, "fp8")
class DenominatorWithDescale(Fp8Core):
    """The denominator, too, is multiplied by the descale of the values."""

    def tile(self, p: Fp8Problem, state: State, s: Tensor, j: int, heads: Tensor) -> State:
        m, total, acc = super().tile(p, state, s, j, heads)
        rescale = self.exp(state[0] - self.base(m))
        self.reached = True
        added = total - state[1] * rescale
        return m, state[1] * rescale + added * self.descale(p, "v", j, heads), acc


@mutant(129, "fp8")
class Fp8ReturnsZeros(Fp8Core):
    """The output is all zero, which other projects' tests of FP8 accept."""

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = super().epilogue(p, m, total, acc)
        self.reached = True
        return torch.zeros_like(o), lse
