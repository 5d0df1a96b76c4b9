"""Mutants of the gradients."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .core import INF, Core, Problem
from .registry import misread, mutant

Gradients = dict[str, Tensor]


@mutant(42, "backward")
class BwdBatchGe2(Core):
    """The backward of every batch element uses the statistics of element 0."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        self.reached |= len(lse) > 1
        return super().backward(p, o, lse[:1].expand_as(lse), do, dlse)


@mutant(43, "layout")
class BwdZero(Core):
    """Zero gradients for inputs in (B, L, H, D) memory."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        found = super().backward(p, o, lse, do, dlse)
        if p.q.stride(1) >= p.q.stride(2):
            return found
        self.reached = True
        return {name: torch.zeros_like(x) for name, x in found.items()}


@mutant(44, "shapes")
class BwdTailInfTimesZero(Core):
    """Padded rows of the last Q tile have lse = -inf: P is inf, and inf times a dO of 0 is NaN."""

    def load_lse(self, lse: Tensor, i: int) -> Tensor:
        tile = super().load_lse(lse, i)
        self.reached |= i + self.block_q > lse.shape[2]
        tile[:, :, lse.shape[2] - i :] = -INF
        return tile

    def inside(self, p: Problem, rows: Tensor, keys: Tensor) -> Tensor:
        return (keys < p.lk).expand(len(rows), -1)


@mutant(45, "backward.zero_dout_gives_zero_gradients")
class NonzeroGradForZeroDout(Core):
    """dS has a term that does not vanish with dO."""

    def dscores(self, prob: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        self.reached = True
        return super().dscores(prob, dp + 1e-4, delta)


@mutant(46, "features.window")
class GradUnwritten(Core):
    """Gradients of keys that no Q tile visits are never written."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        found = super().backward(p, o, lse, do, dlse)
        visited = {j for i in range(0, p.lq, self.block_q) for j in self.backward_tiles(p, i)}
        missing = [j for j in range(0, p.lk, self.block_k) if j not in visited]
        self.reached |= bool(missing)
        for name in "kv":
            fresh = torch.empty_like(getattr(p, name), memory_format=torch.contiguous_format)
            for j in range(0, p.lk, self.block_k):
                if j in visited:
                    fresh[:, :, j : j + self.block_k] = found[name][:, :, j : j + self.block_k]
            found[name] = fresh
        return found


@mutant(48, "backward")
class BwdNoDelta(Core):
    """dS = P o dP without the correction of the row."""

    def dscores(self, prob: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
        self.reached = True
        return prob * dp


@mutant(49, "backward")
class DkMissingScale(Core):
    """The scale is missing on dK only."""

    def scale_dk(self, p: Problem, dk: Tensor) -> Tensor:
        self.reached |= p.scale != 1
        return dk


@mutant(50, "gqa")
class GqaGradNoSum(Core):
    """dK and dV come from the last query head of each group only."""

    def over_groups(self, p: Problem, heads: Tensor, x: Tensor) -> Tensor:
        group = p.heads // p.k.shape[1]
        self.reached |= group > 1
        return x[:, group - 1 :: group].clone()


@mutant(51, "lse.gradient_flows_through_lse")
class LseGradIgnored(Core):
    """The gradient that arrives through the log-sum-exp is dropped."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        self.reached |= bool((dlse != 0).any())
        return super().backward(p, o, lse, do, torch.zeros_like(dlse))


@mutant(0, "lse.gradient_flows_through_lse")
class LseGradIgnoredWithSinks(Core):
    """The gradient that arrives through the log-sum-exp is dropped when there are sinks."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        if p.sinks is not None:
            self.reached |= bool((dlse != 0).any())
            dlse = torch.zeros_like(dlse)
        return super().backward(p, o, lse, do, dlse)


@mutant(0, "contract")
class BwdSpoilsSaved(Core):
    """The backward uses what it saved as scratch memory: a second backward of the same graph is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.spoilt: weakref.WeakSet[Problem] = weakref.WeakSet()

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        if p in self.spoilt:
            self.reached = True
            lse = lse + 1
        self.spoilt.add(p)
        return super().backward(p, o, lse, do, dlse)


@mutant(66, "layout")
class DoutContig(Core):
    """dO is read as contiguous."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        self.reached |= not do.is_contiguous()
        return super().backward(p, o, lse, misread(do), dlse)


@mutant(67, "layout")
class Stride0Dout(Core):
    """An expanded dO, as sum().backward() makes it, is read past its one element."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        if 0 in do.stride() and do.numel():
            self.reached = True
            do = F.pad(do[..., :1], (0, do.shape[-1] - 1))
        return super().backward(p, o, lse, do, dlse)


@mutant(74, "layout")
class DoutStrideAssert(Core):
    """The backward raises when the strides of dO and O differ."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        if do.stride() != o.stride() and do.numel():
            self.reached = True
            raise AssertionError("do.stride() == o.stride()")
        return super().backward(p, o, lse, do, dlse)


@mutant(70, "layout")
class GradWrittenWithInputStrides(Core):
    """dQ is packed, yet written with the strides of a q that is a (B, L, H, D) view."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        found = super().backward(p, o, lse, do, dlse)
        if p.q.stride(1) < p.q.stride(2):
            self.reached = True
            found["q"] = found["q"].transpose(1, 2).reshape(p.q.shape)
        return found


@mutant(84, "backward")
class BwdRace(Core):
    """One tile in fifty is lost from the backward, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def backward_tiles(self, p: Problem, i: int) -> Iterable[int]:
        for j in super().backward_tiles(p, i):
            if self.random.random() < 0.02:
                self.reached = True
            else:
                yield j


@mutant(12, "backward")
class BwdWrongAboveD64(Core):
    """The backward is wrong for D > 64 only: a tile of dK is 3 % too small."""

    def scale_dk(self, p: Problem, dk: Tensor) -> Tensor:
        if p.q.shape[-1] > 64:
            self.reached = True
            dk[:, :, : self.block_k] *= 0.97
        return super().scale_dk(p, dk)


@mutant(0, "backward")
class BwdTopLeft(Core):
    """Forward bottom-right, backward top-left."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        self.reached |= p.lq != p.lk and (p.causal or p.window is not None or p.slopes is not None)
        self.corner = True
        found = super().backward(p, o, lse, do, dlse)
        self.corner = False
        return found

    def diagonal(self, p: Problem) -> int:
        return 0 if getattr(self, "corner", False) else super().diagonal(p)


@mutant(0, "backward")
class DvTailTileLost(Core):
    """dV forgets the last tile of keys when it is partial."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        found = super().backward(p, o, lse, do, dlse)
        self.reached |= p.lk % self.block_k > 0
        found["v"][:, :, p.lk // self.block_k * self.block_k :] = 0
        return found


@mutant(0, "backward")
class DeltaOnePercentOff(Core):
    """The correction of the row is one per cent too large."""

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        self.reached = True
        return super().delta(o, do) * 1.01


@mutant(0, "backward.gradient_of_one_input")
class GradNeedsAll(Core):
    """dK and dV are only computed when q needs a gradient too."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        if p.q.requires_grad or not (p.k.requires_grad or p.v.requires_grad):
            return super().run(p)
        self.reached = True
        zero = (p.k.sum() + p.v.sum()) * 0
        o, lse = super().run(replace(p, k=p.k.detach(), v=p.v.detach()))
        return o + zero.to(o.dtype), lse


@mutant(0, "backward")
class BwdPInE5m2(Core):
    """P of fp16 inputs is rounded to e5m2 in the backward."""

    def recompute(self, p: Problem, s: Tensor, lse: Tensor) -> Tensor:
        prob = super().recompute(p, s, lse)
        if p.q.dtype != torch.float16:
            return prob
        self.reached = True
        return prob.to(torch.float8_e5m2).float()


@mutant(52, "numerics")
class NoneGradCrash(Core):
    """With scores that do not depend on q and k, at scale 0, there is no gradient for them instead of zeros."""

    def backward(self, p: Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor) -> Gradients:
        found = super().backward(p, o, lse, do, dlse)
        if p.scale == 0:
            self.reached = True
            del found["q"], found["k"]
        return found


class _Widened(torch.autograd.Function):
    """The identity, with a gradient in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.float()


@mutant(47, "backward")
class GradDtypeWrong(Core):
    """The gradient of a 16-bit q comes back in float32."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        if not p.q.requires_grad or p.q.dtype == torch.float32:
            return super().run(p)
        self.reached = True
        p.q.grad_dtype = None  # else autograd converts
        return super().run(replace(p, q=_Widened.apply(p.q)))
