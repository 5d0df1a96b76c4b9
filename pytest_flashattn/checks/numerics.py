"""Inputs that are not Gaussian, and problems whose answer is known in closed form."""

from __future__ import annotations

import contextlib
import math

import torch

from .. import attempt
from ..cases import Case
from ..examination import examine, inputs_for
from ..implementation import Implementation, Unsupported
from ..judge import against_value, identical
from ..verdict import Measure, Verdict
from .registry import check


@check()
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Structured inputs: offsets on all logits, peaks, ramps, outliers, constants, zero rows, negative scale."""
    return examine(implementation, inputs_for(implementation, case))


@check()
def one_key(implementation: Implementation, case: Case) -> Verdict:
    """A softmax over one key is 1: the output is that key's value to the bit, and dq and dk vanish against dv."""
    inputs = inputs_for(implementation, case)
    group = case.heads // case.kv_heads
    value = inputs.v.repeat_interleave(group, 1).expand(-1, -1, case.q, -1)
    measures = [identical("o", attempt.forward(implementation, inputs)["o"], value)]
    if implementation.support.gap(case, ("backward",)) is None:
        with contextlib.suppress(Unsupported):  # forward only
            measures += _one_key_gradients(implementation, case)
    return Verdict.of(measures, reason="the softmax over one key is exactly 1")


def _one_key_gradients(implementation: Implementation, case: Case) -> list[Measure]:
    inputs = inputs_for(implementation, case)
    outputs = attempt.backward(implementation, inputs)
    unit = torch.finfo(inputs.q.dtype).eps / 2
    group = case.heads // case.kv_heads
    q, k, v, do = (x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    # dS = dP - Delta = 0 in exact arithmetic; each is one fp32 dot product of do and v, with o = v unrounded.
    slack = 4 * (math.sqrt(case.dv) + 2) * 2.0**-24 * (do.abs() * v.abs()).sum(-1, keepdim=True) * case.d**-0.5
    dk = (slack * q.abs()).sum(2, keepdim=True).unflatten(1, (case.kv_heads, group)).sum(2)
    # 2^-24, the smallest fp16 subnormal: what rounding a vanishing gradient may still leave.
    measures = [
        against_value("dq", outputs["dq"], torch.zeros_like(q), slack * k.abs() + 2.0**-24),
        against_value("dk", outputs["dk"], torch.zeros_like(dk), dk + 2.0**-24),
    ]
    dv = do.sum(2, keepdim=True).unflatten(1, (case.kv_heads, group))
    size = do.abs().sum(2, keepdim=True).unflatten(1, (case.kv_heads, group)).sum(2)
    share = dv.abs().sum(2)  # each head of a group may be rounded before the sum
    limit = 2 * unit * (share + dv.sum(2).abs()) + 2.0**-22 * size + 2.0**-24
    measures.append(against_value("dv", outputs["dv"], dv.sum(2), limit))
    return measures


@check()
def uniform_scores(implementation: Implementation, case: Case) -> Verdict:
    """All visible keys weigh the same: lse is log n plus the common score, the output the mean of the values."""
    inputs = inputs_for(implementation, case)
    want_lse = "lse" in implementation.support.features
    outputs = attempt.forward(implementation, inputs, lse=want_lse)
    rows = torch.arange(case.q, device=inputs.q.device)
    shift = case.k - case.q if implementation.support.alignment == "bottom-right" else 0
    visible = (rows + shift + 1).clamp(0, case.k) if case.causal else torch.full_like(rows, case.k)
    v = inputs.v.double().repeat_interleave(case.heads // case.kv_heads, 1)
    sums = torch.cat([torch.zeros_like(v[:, :, :1]), v.cumsum(2)], 2)[:, :, visible]
    squares = torch.cat([torch.zeros_like(v[:, :, :1]), v.square().cumsum(2)], 2)[:, :, visible]
    count = visible.double().clamp_min(1)[:, None]
    mean = sums / count
    unit = torch.finfo(inputs.q.dtype).eps / 2
    # P = 1/n is rounded the same way for every key, so its error is a common factor; the rest is output rounding.
    limit = 2.1 * unit * mean.abs() + 3 * (unit + 2.0**-22) * squares.sqrt() / count + 2.0**-24
    measures = [against_value("o", outputs["o"], mean, limit)]
    if want_lse:
        score = float(inputs.q[0, 0, 0].double() @ inputs.k[0, 0, 0].double()) * case.d**-0.5
        lse = (count.squeeze(-1).log() + score).masked_fill(visible == 0, -math.inf).expand(outputs["lse"].shape)
        measures.append(
            against_value("lse", outputs["lse"], lse, 2.0**-20 * (abs(score) + lse.abs().nan_to_num(posinf=0) + 1))
        )
    return Verdict.of(measures, reason="all scores are equal")
