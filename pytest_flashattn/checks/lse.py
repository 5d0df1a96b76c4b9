"""The log-sum-exp: half of the answer wherever results are merged or differentiated again."""

from __future__ import annotations

from .. import attempt
from ..cases import Case
from ..examination import examine, inputs_for, judge
from ..implementation import Implementation
from ..verdict import Verdict
from .registry import check


@check(needs=("lse",))
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Output and natural log-sum-exp within their bounds; -inf on rows that see no key."""
    return examine(implementation, inputs_for(implementation, case), backward=False)


@check(needs=("lse", "backward", "lse_grad"))
def gradient_flows_through_lse(implementation: Implementation, case: Case) -> Verdict:
    """Gradients of a loss that uses both the output and the log-sum-exp."""
    inputs = inputs_for(implementation, case)
    wrt = attempt.differentiable(implementation, inputs)
    outputs = attempt.backward(implementation, inputs, wrt=wrt, lse_gradient=True)
    return Verdict.of(judge(implementation, inputs, outputs, lse_gradient=True))
