"""How fast: time, and how time and memory grow. Each timed output is verified like any other."""

from __future__ import annotations

from ..cases import Case
from ..implementation import Implementation
from ..performance import growth, trials
from ..verdict import Verdict
from .registry import check


@check()
def forward(implementation: Implementation, case: Case) -> Verdict:
    """One call without gradients."""
    return trials.timed(implementation, case, "forward")


@check(needs=("backward",))
def backward(implementation: Implementation, case: Case) -> Verdict:
    """The gradients alone, their forward having been run."""
    return trials.timed(implementation, case, "backward")


@check(needs=("backward",))
def forward_backward(implementation: Implementation, case: Case) -> Verdict:
    """A call and its gradients, as in training."""
    return trials.timed(implementation, case, "forward_backward")


@check()
def time_grows_as_the_work(implementation: Implementation, case: Case) -> Verdict:
    """Twice the length takes four times as long, and not more."""
    return growth.exponent(implementation, case)


@check(needs=("backward",))
def memory_grows_as_the_length(implementation: Implementation, case: Case) -> Verdict:
    """Twice the length takes twice the memory, forward and backward: neither S nor P is stored."""
    return growth.memory(implementation, case)


@check()
def causal_costs_half(implementation: Implementation, case: Case) -> Verdict:
    """A causal call skips the tiles that it hides."""
    return growth.causal(implementation, case)


@check()
def window_costs_less(implementation: Implementation, case: Case) -> Verdict:
    """A call with a window skips the tiles that it hides."""
    return growth.window(implementation, case)
