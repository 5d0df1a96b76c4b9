"""The diagonal: who sees whom, and that nobody sees the future."""

from __future__ import annotations

from .. import attempt
from ..cases import Case
from ..examination import examine, inputs_for, judge
from ..implementation import Implementation
from ..judge import identical
from ..verdict import Verdict
from .registry import check

LARGE_VALUE = 8192.0
"""A leaked probability of 1e-6 times this is visible in every dtype, and it is finite in fp16."""


@check(needs=("causal",))
def matches_oracle(implementation: Implementation, case: Case) -> Verdict:
    """Causal output within the bound; rows that see no key are exactly 0."""
    return examine(implementation, inputs_for(implementation, case), backward=False, lse=False)


@check(needs=("causal",))
def future_keys_have_no_effect(implementation: Implementation, case: Case) -> Verdict:
    """Replace what the first half of the rows must not see.

    By other keys of the same kind with huge values: those rows must keep their bits, since a masked key has P = 0 and
    0 times a finite number is 0. By huge keys as well: they may change how a tile is rescaled, so bits may differ, but
    the rows must stay within the bound; a maximum taken before the mask underflows them.
    """
    inputs = inputs_for(implementation, case)
    rows = max(case.q // 2, 1)
    shift = case.k - case.q if implementation.support.alignment == "bottom-right" else 0
    first_hidden = max(rows + shift, 0)  # the last kept row, rows - 1, stands on key rows - 1 + shift
    if first_hidden >= case.k:
        return Verdict("declared", f"top-left alignment: the first {rows} rows see every key")
    before = attempt.forward(implementation, inputs)["o"]

    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, :, first_hidden:] = k[:, :, first_hidden:].flip(2)
    v[:, :, first_hidden:] = LARGE_VALUE
    other = inputs.with_(k=k, v=v)
    after = attempt.forward(implementation, other)["o"]
    if implementation.support.deterministic:
        measures = [identical("o", after[:, :, :rows], before[:, :, :rows])]
    else:
        measures = judge(implementation, other, {"o": after}, noise=False, rows=slice(0, rows))

    k[:, :, first_hidden:] *= 64
    huge = inputs.with_(k=k, v=v)
    seen = attempt.forward(implementation, huge)["o"]
    measures += judge(implementation, huge, {"o": seen}, noise=False, rows=slice(0, rows))
    reason = f"keys from {first_hidden} on lie in the future of rows 0-{rows - 1}, yet change them"
    return Verdict.of(measures, reason=reason)
