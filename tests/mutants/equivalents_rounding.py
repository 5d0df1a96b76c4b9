"""Equivalents that round elsewhere, and as well."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pytest_flashattn.features import FEATURES
from pytest_flashattn.support import Support

from .core import INF, Core, Problem
from .equivalents_registry import equivalent

EVERYTHING = frozenset(FEATURES)
LN2 = math.log(2)
State = tuple[Tensor, Tensor, Tensor]


@equivalent("lazy_rescaling")
class LazyRescaling(Core):
    """The accumulator is rescaled only when the maximum has risen by more than 2^8, as in FlashAttention-4."""

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        peak = torch.maximum(m, s.amax(-1, keepdim=True))
        m_new = torch.where((peak - self.base(m) > 8 * LN2) | (m == -INF), peak, m)
        base = self.base(m_new)
        prob, rescale = self.exp(s - base), self.exp(m - base)
        return m_new, total * rescale + prob.sum(-1, keepdim=True), self.accumulate(p, acc * rescale, prob, v)


@equivalent("p_normalised_first")
class PNormalisedFirst(Core):
    """Two passes: P is divided by the denominator before it is rounded."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        self.lse = None
        self.lse = super().forward(p)[1]
        return super().forward(p)[0], self.lse

    def start(self, p: Problem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.tile = 0 if self.lse is None else getattr(self, "tile", 0)
        return super().start(p, q)

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.lse is None:
            return super().step(p, m, total, acc, s, v)
        i = self.tile % max(-(-p.lq // self.block_q), 1) * self.block_q
        return m, total, self.accumulate(p, acc, self.exp(s - self.load_lse(self.lse, i)), v)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        if self.lse is None:
            return super().epilogue(p, m, total, acc)
        self.tile += 1
        return acc, m.squeeze(-1)

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().sink(p, m, total, acc) if self.lse is None else (m, total, acc)


@equivalent("p_sum_of_rounded")
class PSumOfRounded(Core):
    """The output is divided by the sum of P as it was rounded; the log-sum-exp keeps the exact sum."""

    def start(self, p: Problem, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, total, acc = super().start(p, q)
        self.rounded_total = total
        return m, total, acc

    def step(
        self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        m_new, total, acc = super().step(p, m, total, acc, s, v)
        base = self.base(m_new)
        prob = self.rounded(p, self.exp(s - base))
        self.rounded_total = self.rounded_total * self.exp(m - base) + prob.sum(-1, keepdim=True)
        return m_new, total, acc

    def sink(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, self.rounded_total, _ = super().sink(p, m, self.rounded_total, acc)
        return super().sink(p, m, total, acc)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        return super().epilogue(p, m, self.rounded_total, acc)[0], super().epilogue(p, m, total, acc)[1]


@equivalent("base2")
class Base2(Core):
    """exp2 with log2(e) folded into the scores, the log-sum-exp converted at the end."""

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x * (1 / LN2))


@equivalent("scale_into_q")
class ScaleIntoQ(Core):
    """The scale is multiplied into float32 q before the product."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        return (q * p.scale) @ k.mT


@equivalent("fp32_p")
class Fp32P(Core):
    """P and dS stay in float32, as declared."""

    __flashattn__ = Support(features=EVERYTHING, p_dtype="fp32")

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        return x


@equivalent("tf32")
class Tf32(Core):
    """float32 operands rounded to TF32, as declared."""

    __flashattn__ = Support(features=EVERYTHING, tf32=True)

    def load(self, x: Tensor, start: int, rows: int) -> Tensor:
        tile = super().load(x, start, rows)
        return tile if x.shape[-1] == 1 else _tf32(tile)  # width 1: lse and delta, which enter no product

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        return _tf32(super().rounded(p, x))


def _tf32(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@equivalent("delta_from_p")
class DeltaFromP(Core):
    """The correction of a row comes from the unrounded output, which is kept for the backward."""

    def forward(self, p: Problem) -> tuple[Tensor, Tensor]:
        whole = super().forward(replace(p, q=p.q.float()))  # P is not rounded either: a float32 output
        self.exact = whole[0]
        return super().forward(p)

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        return super().delta(self.exact, do)


@equivalent("heads_rounded_before_sum")
class HeadsRoundedBeforeSum(Core):
    """dK and dV of each query head are rounded before they are summed over the group, as PyTorch does."""

    def over_groups(self, p: Problem, heads: Tensor, x: Tensor) -> Tensor:
        return super().over_groups(p, heads, self.rounded(p, x))


@equivalent("p_ties_away")
class PTiesAway(Core):
    """P and dS are rounded to the nearest, ties away from zero."""

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        near = x.to(p.q.dtype)
        away = torch.nextafter(near, torch.copysign(torch.full_like(near, INF), near))
        return torch.where((away.float() - x).abs() <= (near.float() - x).abs(), away, near).float()


@equivalent("p_round_bias")
class PRoundBias(Core):
    """One P in sixteen is truncated instead of rounded: a bias of a sixteenth of what must fail."""

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        near = prob.to(p.q.dtype)
        down = torch.where(near.float() > prob, torch.nextafter(near, torch.zeros_like(near)), near)
        every = torch.arange(prob.shape[-1]) % 16 == 0
        return acc + torch.where(every, down, near).float() @ v


@equivalent("p_in_bf16")
class PInBf16(Core):
    """P and dS are rounded to bf16 whatever the inputs are, as declared."""

    __flashattn__ = Support(features=EVERYTHING, p_dtype="bf16")

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).float()


@equivalent("gradients_summed_in_input_dtype")
class GradientsSummedInInputDtype(Core):
    """dq, dk and dv are kept in the input dtype between tiles and between heads, as declared."""

    __flashattn__ = Support(features=EVERYTHING, gradient_sums="input")

    def gradient_buffer(self, p: Problem, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=p.q.dtype)


@equivalent("float64_inside")
class Float64Inside(Core):
    """Everything but the output in float64."""

    __flashattn__ = Support(features=EVERYTHING, p_dtype="fp32")

    def load(self, x: Tensor, start: int, rows: int) -> Tensor:
        return super().load(x, start, rows).double()

    def rounded(self, p: Problem, x: Tensor) -> Tensor:
        return x

    def gradient_buffer(self, p: Problem, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64)

    def delta(self, o: Tensor, do: Tensor) -> Tensor:
        return (o.double() * do.double()).sum(-1, keepdim=True)


@equivalent("base2_throughout")
class Base2Throughout(Core):
    """Scores, maxima and the log-sum-exp in units of log 2 until the end."""

    def scores(self, p: Problem, q: Tensor, k: Tensor, i: int, j: int) -> tuple[Tensor, Tensor | None]:
        s, slope = super().scores(p, q, k, i, j)
        return s * (1 / LN2), slope

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp2(x)

    def sink_logit(self, p: Problem, like: Tensor) -> Tensor:
        return super().sink_logit(p, like) * (1 / LN2)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        return super().epilogue(p, m, total, acc)[0], ((m + total.log2()) * LN2).squeeze(-1)

    def load_lse(self, lse: Tensor, i: int) -> Tensor:
        return super().load_lse(lse, i) * (1 / LN2)

    def dsinks(self, p: Problem, lse: Tensor, delta: Tensor) -> Tensor:
        return super().dsinks(p, lse * (1 / LN2), delta)


@equivalent("exp2_polynomial")
class Exp2Polynomial(Core):
    """exp2 as a polynomial of degree six on the fraction, scaled by the exponent: units in the last place off."""

    def exp(self, x: Tensor) -> Tensor:
        y = (x * (1 / LN2)).clamp(min=-126)
        whole = y.round()
        f = (y - whole) * LN2  # |f| <= log(2) / 2, where the series of degree six is 1e-7 off
        value = 1 + f * (1 + f * (1 / 2 + f * (1 / 6 + f * (1 / 24 + f * (1 / 120 + f * (1 / 720))))))
        return torch.where(x < -87, 0.0, torch.ldexp(value, whole))


@equivalent("large_finite_sentinel")
class LargeFiniteSentinel(Core):
    """-3e38 stands for -inf, and a row that never rises above it counts as empty."""

    def start(self, p: Problem, q: Tensor) -> State:
        m, total, acc = super().start(p, q)
        return m.fill_(-3e38), total, acc

    def masked(self, p: Problem, s: Tensor, seen: Tensor) -> Tensor:
        s = s.masked_fill(~seen, -3e38)
        return s.masked_fill(s == -INF, -3e38)

    def step(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor) -> State:
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        prob = self.exp(s - m_new).masked_fill(s == -3e38, 0)
        rescale = self.exp(m - m_new)
        return m_new, total * rescale + prob.sum(-1, keepdim=True), self.accumulate(p, acc * rescale, prob, v)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = super().epilogue(p, m, total, acc)
        return o, lse.masked_fill(m.squeeze(-1) == -3e38, -INF)

    def recompute(self, p: Problem, s: Tensor, lse: Tensor) -> Tensor:
        return super().recompute(p, s.masked_fill(s == -3e38, -INF), lse)
