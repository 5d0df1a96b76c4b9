"""FP8 inputs with descales: judged on the quantised numbers that the implementation received."""

from __future__ import annotations

from .. import attempt
from ..cases import Case
from ..examination import examine, inputs_for, judge
from ..implementation import Implementation
from ..judge import identical
from ..verdict import Measure, Verdict
from .registry import check


@check()
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Output and log-sum-exp within the bound of FP8 arithmetic, with descales that differ from each other."""
    return examine(implementation, inputs_for(implementation, case))


@check()
def powers_of_two(implementation: Implementation, case: Case) -> Verdict:
    """Descales times powers of two are exact: v's double the output, q's and k's cancel, to the last bit.

    Where the same call need not give the same bits, the changed problem is judged like any other.
    """
    inputs = inputs_for(implementation, case)
    first = attempt.forward(implementation, inputs)["o"].clone()
    q, k, v = (inputs.options()[f"{name}_descale"] for name in ("q", "k", "v"))
    doubled, moved = inputs.with_(v_descale=v * 2), inputs.with_(q_descale=q * 4, k_descale=k / 4)
    measures: list[Measure] = []
    for other, want in ((doubled, first * 2), (moved, first)):
        got = attempt.forward(implementation, other)["o"]
        if implementation.support.deterministic:
            measures.append(identical("o", got, want))
        measures += judge(implementation, other, {"o": got}, noise=False)
    return Verdict.of(measures, reason="descales were multiplied by powers of two")
