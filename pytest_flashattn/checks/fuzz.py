"""Everything that can be asked of any case: what a drawn case is judged by."""

from __future__ import annotations

from collections.abc import Callable

from ..cases import Case
from ..examination import examine, inputs_for
from ..implementation import Implementation
from ..verdict import Measure, Verdict
from . import causal, contract, lse
from .registry import Function, check


def _with_lse_gradient(implementation: Implementation, case: Case) -> bool:
    return implementation.support.gap(case, ("lse", "backward", "lse_grad")) is None


def _has_future(implementation: Implementation, case: Case) -> bool:
    # Keys 64 times larger must stay finite in fp16: other families have large ones already.
    shift = case.k - case.q if implementation.support.alignment == "bottom-right" else 0
    return case.causal and case.family == "normal" and case.q > 1 and max(case.q // 2 + shift, 0) < case.k


def _repeats(implementation: Implementation, case: Case) -> bool:
    return implementation.support.deterministic


RELATIONS: tuple[tuple[Callable[[Implementation, Case], bool], Function], ...] = (
    (_with_lse_gradient, lse.gradient_flows_through_lse),
    (_has_future, causal.future_keys_have_no_effect),
    (_repeats, contract.same_call_twice),
)
"""What is asked on top of the oracle, and of which cases: checks of other chapters that hold for any case."""


@check()
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Output, log-sum-exp, gradients, gradients through the log-sum-exp; future keys unseen; the same bits again."""
    verdict = examine(implementation, inputs_for(implementation, case))
    measures: list[Measure] = list(verdict.measures)
    for applies, relation in RELATIONS:
        if verdict.status != "verified":
            return verdict
        if applies(implementation, case):
            verdict = relation(implementation, case)
            measures += verdict.measures
    return Verdict.of(measures) if verdict.status == "verified" else verdict
