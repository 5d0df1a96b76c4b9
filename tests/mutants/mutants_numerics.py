"""Mutants of rounding, scaling and the online softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .core import INF, Core, Problem
from .registry import mutant

HALF = (torch.float16, torch.bfloat16)
State = tuple[Tensor, Tensor, Tensor]


@mutant(35, "numerics")
class NoMaxSubtraction(Core):
    """exp without subtracting the maximum of the row."""

    def start(self, p: Problem, q: Tensor) -> State:
        m, total, acc = super().start(p, q)
        return torch.zeros_like(m), total, acc

    def step(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor) -> State:
        self.reached = True
        prob = self.exp(s)
        return m, total + prob.sum(-1, keepdim=True), self.accumulate(p, acc, prob, v)


@mutant(36, "numerics")
class FiniteNegInfSentinel(Core):
    """-5e4 stands for -inf; rows that never rise above it count as empty."""

    def masked(self, p: Problem, s: Tensor, seen: Tensor) -> Tensor:
        self.reached |= not bool(seen.all())
        return s.masked_fill(~seen, -5e4)

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = super().epilogue(p, m, total, acc)
        return o.masked_fill(m <= -5e4, 0), lse.masked_fill(m.squeeze(-1) <= -5e4, -INF)


@mutant(37, "forward")
class Fp16Acc(Core):
    """P V is accumulated in fp16 (fp16 inputs only)."""

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        if p.q.dtype != torch.float16:
            return super().accumulate(p, acc, prob, v)
        self.reached = True
        prob = self.rounded(p, prob)
        for part in range(0, self.block_k, 16):  # one instruction of the tensor core adds 16 keys
            acc = (acc + prob[..., part : part + 16] @ v[:, :, part : part + 16]).half().float()
        return acc


@mutant(37, "forward")
class Fp16AccOnBf16(Core):
    """P V is accumulated in fp16 although inputs are bf16."""

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        if p.q.dtype != torch.bfloat16:
            return super().accumulate(p, acc, prob, v)
        self.reached = True
        prob = self.rounded(p, prob)
        for part in range(0, self.block_k, 16):
            acc = (acc + prob[..., part : part + 16] @ v[:, :, part : part + 16]).half().float()
        return acc


@mutant(38, "numerics")
class Fp16Qk(Core):
    """Q K^T in fp16, unscaled: rounds, and overflows at 65504 (fp16 inputs only)."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        if p.q.dtype != torch.float16:
            return super().scaled(p, q, k)
        self.reached = True
        return (q @ k.mT).half().float() * p.scale


@mutant(0, "forward")
class ScoresRounded(Core):
    """Scores are rounded to the input dtype, as plain PyTorch does."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        self.reached |= p.q.dtype in HALF
        return super().scaled(p, q, k).to(p.q.dtype).float()


@mutant(39, "numerics")
class ScaleSqrtSplit(Core):
    """sqrt(scale) on q and on k: NaN for a negative scale."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        self.reached |= p.scale < 0
        root = torch.tensor(p.scale).sqrt()
        return (q * root) @ (k * root).mT


@mutant(40, "metamorphic.ones_value")
class PTruncated(Core):
    """P is truncated to 16 bits, not rounded, and the denominator is not: every output shrinks."""

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        if p.q.dtype not in HALF:
            return super().accumulate(p, acc, prob, v)
        self.reached = True
        down = prob.to(p.q.dtype)
        down = torch.where(down.float() > prob, torch.nextafter(down, torch.zeros_like(down)), down)
        return acc + down.float() @ v


@mutant(41, "numerics")
class RescaleSkipped(Core):
    """The accumulator is not rescaled when the running maximum rises."""

    def step(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor) -> State:
        m_new, total_new, _ = super().step(p, m, total, acc, s, v)
        self.reached |= bool(((m_new > m) & (m > -INF)).any())
        return m_new, total_new, self.accumulate(p, acc, self.exp(s - self.base(m_new)), v)


@mutant(0, "forward")
class ScaleOffByATenthPercent(Core):
    """The scale is 0.1 % too large."""

    def scaled(self, p: Problem, q: Tensor, k: Tensor) -> Tensor:
        self.reached = True
        return super().scaled(p, q, k) * 1.001


@mutant(0, "forward")
class ExpQuadratic(Core):
    """exp by a polynomial of degree two on the fraction: 0.3 % off."""

    def exp(self, x: Tensor) -> Tensor:
        self.reached = True
        y = (x * math.log2(math.e)).clamp(min=-126)
        fraction = y - y.floor()
        value = torch.ldexp(1 + fraction * (0.6565 + 0.3435 * fraction), y.floor())
        return torch.where(x < -87, 0.0, value)


@mutant(0, "forward")
class PInE4m3(Core):
    """P is rounded to fp8 before P V."""

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        self.reached = True
        return acc + prob.to(torch.float8_e4m3fn).float() @ v


@mutant(0, "metamorphic.ones_value")
class ReciprocalRounded(Core):
    """The reciprocal of the denominator is rounded to the input dtype."""

    def epilogue(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor) -> tuple[Tensor, Tensor]:
        _, lse = super().epilogue(p, m, total, acc)
        self.reached |= p.q.dtype in HALF
        return acc * (1 / total.masked_fill(total == 0, 1)).to(p.q.dtype).float(), lse


@mutant(0, "forward")
class DenominatorFp16(Core):
    """The denominator is summed in fp16: long rows stop growing."""

    def step(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor) -> State:
        m_new, total_new, acc_new = super().step(p, m, total, acc, s, v)
        self.reached = True
        return m_new, total_new.half().float(), acc_new


@mutant(0, "lse")
class LseRounded(Core):
    """The log-sum-exp passes through the input dtype before it is returned."""

    def run(self, p: Problem) -> tuple[Tensor, Tensor]:
        o, lse = super().run(p)
        self.reached |= p.q.dtype in HALF
        return o, lse.to(p.q.dtype).float()


@mutant(0, "metamorphic.ones_value")
class OutputRoundedTwice(Core):
    """Partial outputs are kept in the input dtype between tiles."""

    def accumulate(self, p: Problem, acc: Tensor, prob: Tensor, v: Tensor) -> Tensor:
        self.reached |= p.q.dtype in HALF
        return super().accumulate(p, acc, prob, v).to(p.q.dtype).float()


@mutant(0, "numerics")
class DenominatorNotRescaled(Core):
    """The denominator is not rescaled when the running maximum rises; the accumulator is."""

    def step(self, p: Problem, m: Tensor, total: Tensor, acc: Tensor, s: Tensor, v: Tensor) -> State:
        m_new, total_new, acc_new = super().step(p, m, total, acc, s, v)
        self.reached |= bool(((m_new > m) & (m > -INF)).any())
        lost = total * (1 - self.exp(m - self.base(m_new)))
        return m_new, total_new + lost, acc_new
