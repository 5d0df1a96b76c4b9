"""Lengths around tile edges, primes, one, none."""

from __future__ import annotations

from ..cases import Case
from ..examination import examine, inputs_for
from ..implementation import Implementation
from ..verdict import Verdict
from .registry import check


@check()
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Output, log-sum-exp and gradients within their bounds."""
    return examine(implementation, inputs_for(implementation, case))
