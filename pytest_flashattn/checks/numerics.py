"""Inputs that are not Gaussian, and problems whose answer is known in closed form."""

from __future__ import annotations

import contextlib
import math

import torch

from .. import attempt
from ..cases import Case
from ..examination import examine, inputs_for, truth
from ..implementation import Implementation, Unsupported
from ..judge import against_value, identical
from ..tolerances import limits
from ..verdict import Measure, Verdict
from .registry import check


@check()
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Structured inputs: offsets on all logits, peaks, ramps, outliers, constants, zero rows, negative scale."""
    return examine(implementation, inputs_for(implementation, case))


@check()
def one_key(implementation: Implementation, case: Case) -> Verdict:
    """A softmax over one key is 1: the output is its value (16 bits: to the bit), dq and dk vanish against dv."""
    inputs = inputs_for(implementation, case)
    group = case.heads // case.kv_heads
    value = inputs.v.repeat_interleave(group, 1).expand(-1, -1, case.q, -1)
    o = attempt.forward(implementation, inputs)["o"]
    if case.dtype == "fp32":  # V may be split into tf32 parts, or rounded to one, on its way
        limit = truth(implementation, inputs)["o"].limit(limits("o", case).lam)
        measures = [against_value("o", o, value.double(), limit)]
    else:
        measures = [identical("o", o, value)]
    if implementation.support.gap(case, ("backward",)) is None:
        with contextlib.suppress(Unsupported):  # forward only
            measures += _one_key_gradients(implementation, case)
    return Verdict.of(measures, reason="the softmax over one key is exactly 1")


def _one_key_gradients(implementation: Implementation, case: Case) -> list[Measure]:
    inputs = inputs_for(implementation, case)
    outputs = attempt.backward(implementation, inputs)
    expected = truth(implementation, inputs, backward=True)
    group = case.heads // case.kv_heads
    dv = inputs.dout.double().sum(2, keepdim=True).unflatten(1, (case.kv_heads, group)).sum(2)
    # dS = dP - Delta is 0 with one key; how far each may be off is the oracle's business, the value is not.
    values = {"dq": torch.zeros_like(inputs.q).double(), "dk": torch.zeros_like(inputs.k).double(), "dv": dv}
    return [
        against_value(name, outputs[name], value, expected[name].limit(limits(name, case).lam))
        for name, value in values.items()
    ]


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
    count = visible.double().clamp_min(1)[:, None]
    expected = truth(implementation, inputs)
    # The values are closed forms; how far off a correct kernel may be is the oracle's business.
    measures = [against_value("o", outputs["o"], sums / count, expected["o"].limit(limits("o", case).lam))]
    if want_lse:
        score = float(inputs.q[0, 0, 0].double() @ inputs.k[0, 0, 0].double()) * case.d**-0.5
        lse = (count.squeeze(-1).log() + score).masked_fill(visible == 0, -math.inf).expand(outputs["lse"].shape)
        measures.append(against_value("lse", outputs["lse"], lse, expected["lse"].limit(limits("lse", case).lam)))
    return Verdict.of(measures, reason="all scores are equal")
