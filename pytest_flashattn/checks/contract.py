"""What a caller relies on besides numbers: inputs kept, outputs fresh, the same answer twice, loud refusals."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from .. import attempt
from ..cases import Case
from ..examination import inputs_for, judge
from ..features import FEATURES
from ..implementation import Implementation, Unsupported
from ..inputs import Inputs
from ..judge import identical
from ..verdict import Measure, Verdict
from .registry import check


@check()
def shape_dtype_device(implementation: Implementation, case: Case) -> Verdict:
    """The output has the shape of the contract, q's dtype and q's device (a call that breaks this raises here)."""
    inputs = inputs_for(implementation, case)
    o = attempt.forward(implementation, inputs)["o"]
    facts = (tuple(o.shape), o.dtype, o.device.type)
    want = ((case.batch, case.heads, case.q, case.dv), inputs.q.dtype, inputs.q.device.type)
    if facts != want:
        return Verdict.failed(f"returned {facts}, expected {want}")
    return Verdict.of([Measure("o", "exact", 0.0, 0.0, 0, o.numel())])


@check()
def inputs_unchanged(implementation: Implementation, case: Case) -> Verdict:
    """q, k, v and dO hold the same bits after the call and after its backward (`attempt` sees to it in every check)."""
    inputs = inputs_for(implementation, case)
    copies = {name: getattr(inputs, name).clone() for name in ("q", "k", "v", "dout")}
    try:
        if implementation.support.gap(case, ("backward",)) is None:
            attempt.backward(implementation, inputs)
    except Unsupported:
        pass
    attempt.forward(implementation, inputs)
    return Verdict.of(
        [identical(name, getattr(inputs, name), copy) for name, copy in copies.items()], reason="an input changed"
    )


@check()
def output_is_fresh(implementation: Implementation, case: Case) -> Verdict:
    """The output shares no memory with an input or with the output of the call before."""
    inputs = inputs_for(implementation, case)
    first = attempt.forward(implementation, inputs)["o"]
    kept = first.clone()
    other = inputs.with_(q=-inputs.q)
    second = attempt.forward(implementation, other)["o"]
    if case.layout == "plain" and any(_share(first, x) for x in (inputs.q, inputs.k, inputs.v)):
        return Verdict.failed("the output shares its memory with an input; allocate a new tensor")
    if _share(first, second):
        return Verdict.failed("two calls returned the same memory; the second overwrote the first's result")
    return Verdict.of([identical("o", first, kept)], reason="a second call changed the first call's output")


@check()
def fresh_memory_has_no_effect(implementation: Implementation, case: Case) -> Verdict:
    """The same call over memory that held NaN and over memory that held large numbers: every element is written."""
    inputs = inputs_for(implementation, case)
    first = attempt.forward(implementation, inputs, fill=math.nan)["o"].clone()
    second = attempt.forward(implementation, inputs, fill=3e4)["o"]
    if not implementation.support.deterministic:
        return Verdict.of(judge(implementation, inputs, {"o": second}, noise=False))
    return Verdict.of([identical("o", second, first)], reason="the output depends on what its memory held before")


@check()
def same_call_twice(implementation: Implementation, case: Case) -> Verdict:
    """The same call gives the same bits, with equal inputs in other memory."""
    inputs = inputs_for(implementation, case)
    first = attempt.forward(implementation, inputs)["o"].clone()
    again = inputs_for(implementation, case)
    second = attempt.forward(implementation, again)["o"]
    return Verdict.of(_same(implementation, inputs, second, first), reason="the same call gave another result")


@check(needs=("backward",))
def backward_twice(implementation: Implementation, case: Case) -> Verdict:
    """The backward of one graph, run again (retain_graph), gives right gradients again: nothing saved is used up."""
    inputs = inputs_for(implementation, case)
    measures = []
    for times in (2, 3):
        measures += judge(implementation, inputs, attempt.backward(implementation, inputs, times=times), noise=False)
    return Verdict.of(measures, reason="the backward was run again on the same graph")


@check()
def a_then_b_then_a(implementation: Implementation, case: Case) -> Verdict:
    """Calls of other shapes, options and contents in between are right themselves and leave no trace."""
    inputs = inputs_for(implementation, case)
    first = attempt.forward(implementation, inputs)["o"].clone()
    measures = []
    longer = replace(case, batch=case.batch + 1, q=case.q + 64, k=case.k + 64)
    for other in (longer, replace(longer, causal=not case.causal), replace(case, d=case.d * 2, dv=case.dv * 2)):
        if implementation.support.gap(other) is None:
            between = inputs_for(implementation, other)
            measures += judge(implementation, between, attempt.forward(implementation, between), noise=False)
    # The same objects with other content: a result looked up by identity or address would be stale.
    inputs.q.neg_()
    attempt.forward(implementation, inputs)
    inputs.q.neg_()
    again = attempt.forward(implementation, inputs)["o"]
    measures += _same(implementation, inputs, again, first)
    return Verdict.of(measures, reason="calls of other shapes and options came in between")


@check()
def content_is_read(implementation: Implementation, case: Case) -> Verdict:
    """The same tensors with new numbers in one of them give the new answer, not a remembered one."""
    inputs = inputs_for(implementation, case)
    attempt.forward(implementation, inputs)
    measures = []
    for name in ("v", "k", "q"):
        getattr(inputs, name).neg_()
        measures += judge(implementation, inputs, attempt.forward(implementation, inputs))
    return Verdict.of(measures, reason="v, k and q were changed in place, one before each call")


@check()
def undeclared_features_raise(implementation: Implementation, case: Case) -> Verdict:
    """Asked for a feature that it does not declare, an implementation raises, or it is right all the same."""
    wrong: list[str] = []
    asked = 0
    for name, example in _examples(case).items():
        if implementation.support.gap(example) is None or name in implementation.support.features:
            continue
        asked += 1
        inputs = inputs_for(implementation, example)
        try:
            outputs = attempt.forward(implementation, inputs, lse=name == "lse")
        except Exception:  # any refusal will do: the type of the error is the implementation's business
            continue
        if not all(m.ok for m in judge(implementation, inputs, outputs, noise=False)):
            wrong.append(f"{name} ({FEATURES[name]})")
    if not asked:
        return Verdict("declared", "declares every feature: there is nothing to refuse")
    if wrong:
        return Verdict.failed(
            f"undeclared, yet accepted, and the numbers are wrong: {'; '.join(wrong)}; raise NotImplementedError"
        )
    return Verdict.of([Measure("refusals", "exact", 0.0, 0.0, 0, asked)])


def _examples(case: Case) -> dict[str, Case]:
    """One case a feature, as near to `case` as it can be."""
    plain = replace(case, causal=False, heads=2, kv_heads=2, k=case.q, dv=case.d)
    return {
        "causal": replace(plain, causal=True),
        "cross": replace(plain, k=plain.k + 37),
        "gqa": replace(plain, kv_heads=1),
        "dv": replace(plain, dv=plain.d // 2),
        "scale": replace(plain, scale=0.3),
        "window": replace(plain, window=(8, 3)),
        "softcap": replace(plain, softcap=2.0),
        "alibi": replace(plain, alibi=True),
        "bias": replace(plain, bias="11qk"),
        "mask": replace(plain, mask="11qk"),
        "sinks": replace(plain, sinks=True),
        "lse": plain,
    }


def _same(implementation: Implementation, inputs: Inputs, got: torch.Tensor, want: torch.Tensor) -> list[Measure]:
    if not implementation.support.deterministic:
        return judge(implementation, inputs, {"o": got}, noise=False)
    return [identical("o", got, want)]


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
