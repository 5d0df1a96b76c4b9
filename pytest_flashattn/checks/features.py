"""Optional features, each with the output, the log-sum-exp and the gradients that are declared with it."""

from __future__ import annotations

from ..cases import Case
from ..examination import examine, inputs_for
from ..implementation import Implementation
from ..verdict import Verdict
from .registry import check


def _examine(implementation: Implementation, case: Case) -> Verdict:
    return examine(implementation, inputs_for(implementation, case))


@check(needs=("window",))
def window(implementation: Implementation, case: Case) -> Verdict:
    """Two-sided windows, measured on the same diagonal as causal."""
    return _examine(implementation, case)


@check(needs=("softcap",))
def softcap(implementation: Implementation, case: Case) -> Verdict:
    """c * tanh(s / c), before the mask."""
    return _examine(implementation, case)


@check(needs=("alibi",))
def alibi(implementation: Implementation, case: Case) -> Verdict:
    """-slope * distance to the diagonal."""
    return _examine(implementation, case)


@check(needs=("bias",))
def bias(implementation: Implementation, case: Case) -> Verdict:
    """An additive bias in its broadcast patterns, and its gradient where declared."""
    return _examine(implementation, case)


@check(needs=("mask",))
def mask(implementation: Implementation, case: Case) -> Verdict:
    """A boolean mask (True = visible), with rows that see nothing."""
    return _examine(implementation, case)


@check(needs=("sinks",))
def sinks(implementation: Implementation, case: Case) -> Verdict:
    """One extra logit a head in the denominator, and its gradient where declared."""
    return _examine(implementation, case)


@check(needs=("dv",))
def value_dim(implementation: Implementation, case: Case) -> Verdict:
    """Values narrower or wider than keys."""
    return _examine(implementation, case)
