"""The output against the float64 oracle."""

from __future__ import annotations

from ..cases import Case
from ..examination import examine, inputs_for
from ..implementation import Implementation
from ..verdict import Verdict
from .registry import check


@check()
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Every element within the bound of the arithmetic; noise no larger than the arithmetic's own."""
    return examine(implementation, inputs_for(implementation, case), backward=False, lse=False)
