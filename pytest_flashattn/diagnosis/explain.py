"""From a failure to at most three sentences: which quantity, in which order, within which time."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import oracles

from .. import examination
from ..inputs import Inputs
from ..judge import against_bound
from ..tolerances import limits
from ..verdict import Measure
from . import explain_gradient, explain_output, shape
from .budget import Budget
from .failure import Failure
from .notebook import Call, Notebook

SCORES = 2**24
"""Score elements of a case that is compared with alternatives; larger ones get the shape of their error only."""

LINES = 3
ORDER = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
"""What is explained first: a wrong output spoils what is computed from it."""


def explain(
    notebook: Notebook,
    inputs: Inputs,
    outputs: Mapping[str, Tensor],
    expected: Mapping[str, oracles.Truth],
    measures: list[Measure],
    rows: slice = slice(None),
) -> tuple[str, ...]:
    """Lines of diagnosis for what `judge` found wrong in a call; empty when there is nothing to say.

    rows: the query rows that were judged.
    """
    call = next((c for c in reversed(notebook.calls) if any(c.outputs.get(n) is x for n, x in outputs.items())), None)
    wrong = {m.quantity for m in measures if not m.ok}
    if call is not None and "o" not in outputs and not _measure("o", call, expected).ok:
        # The check did not judge it, but it is the cause of the rest.
        outputs, wrong = {**outputs, "o": call.outputs["o"]}, {"o"}
    failure = Failure(notebook, inputs, outputs, expected, rows, call, Budget(notebook.started))
    name = next(n for n in ORDER if n in wrong)
    b, hq, lq, _ = inputs.q.shape
    if not notebook.full() or b * hq * lq * inputs.k.shape[2] > SCORES:
        return _short(_by_shape(failure, name))
    explained = {"o": explain_output.output, "lse": explain_output.log_sum_exp}.get(name, explain_gradient.gradients)
    return _short(explained(failure)) or _short(_by_shape(failure, name))


def last_call(notebook: Notebook) -> tuple[str, ...]:
    """Lines for a check that judges by a rule of its own: the first call that is wrong, else a rounding."""
    for call in (c for c in notebook.calls if c.unchanged):
        expected = _truth(notebook, call)
        measures = [_measure(n, call, expected) for n in call.outputs if n in expected]
        if not all(m.ok for m in measures):
            return explain(notebook, call.inputs, call.outputs, expected, measures)
    last = next((c for c in reversed(notebook.calls) if c.unchanged), None)
    if last is None or not notebook.full():
        return ()
    budget = Budget(notebook.started)
    failure = Failure(notebook, last.inputs, last.outputs, _truth(notebook, last), slice(None), last, budget)
    return _short(explain_output.rounded(failure))


def _measure(name: str, call: Call, expected: Mapping[str, oracles.Truth]) -> Measure:
    return against_bound(name, call.outputs[name], expected[name], limits(name, call.inputs.case).lam)


def _truth(notebook: Notebook, call: Call) -> dict[str, oracles.Truth]:
    flows = bool(call.keywords.get("lse_gradient"))
    return examination.truth(notebook.implementation, call.inputs, backward=call.backward, lse_gradient=flows)


def _short(lines: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line for line in lines if line))[:LINES]


def _by_shape(failure: Failure, name: str) -> list[str]:
    """What can be said without comparison."""
    sample = failure.sample(name)
    problem = failure.problem(torch.zeros(1, dtype=torch.long, device=failure.inputs.q.device))
    return [
        shape.not_finite(sample)
        or shape.whole_factor(problem, sample)
        or shape.row_factors(sample)
        or shape.tail_only(sample)
    ]
