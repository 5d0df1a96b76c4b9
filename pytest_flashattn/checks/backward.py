"""Gradients of q, k and v, judged as strictly as the output."""

from __future__ import annotations

import torch

from .. import attempt
from ..cases import Case
from ..examination import inputs_for, judge
from ..implementation import Implementation
from ..judge import identical
from ..verdict import Measure, Verdict
from .registry import check


@check(needs=("backward",))
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """dq, dk and dv within their bounds, in every layout of dO."""
    inputs = inputs_for(implementation, case)
    return Verdict.of(judge(implementation, inputs, attempt.backward(implementation, inputs)))


@check(needs=("backward",))
def zero_dout_gives_zero_gradients(implementation: Implementation, case: Case) -> Verdict:
    """With dO = 0 every gradient is exactly zero."""
    inputs = inputs_for(implementation, case)
    outputs = attempt.backward(implementation, inputs)
    measures = [identical(name, outputs[name], torch.zeros_like(outputs[name])) for name in ("dq", "dk", "dv")]
    return Verdict.of(measures, reason="dO is zero, yet a gradient is not")


@check(needs=("backward",))
def gradient_of_one_input(implementation: Implementation, case: Case) -> Verdict:
    """The gradient of q, k or v alone, the others being constants."""
    inputs = inputs_for(implementation, case)
    measures: list[Measure] = []
    for name in ("q", "k", "v"):
        outputs = attempt.backward(implementation, inputs, wrt=(name,))
        measures += judge(implementation, inputs, {f"d{name}": outputs[f"d{name}"]}, noise=False)
    return Verdict.of(measures, reason="only one of q, k, v needed a gradient")
