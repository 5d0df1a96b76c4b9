"""The same call again, with one thing made harmless: what changes the answer names the fault.

At most a few calls, only where comparison with alternatives is not enough, and only when a call takes little time.
What an implementation raises here is no finding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import attempt
from ..implementation import ImplementationError
from ..inputs import Inputs
from ..layouts import FAR, place
from ..tolerances import limits
from .failure import Failure
from .match import within

STORAGE = 2**24
"""Elements of a tensor's memory that are copied for an experiment."""

FILLS = (7.0, 11.0, 13.0)


def _again(failure: Failure, inputs: Inputs, **changes: Any) -> Mapping[str, Tensor] | None:
    """The outputs of the same call on these inputs; None when it raises, is too slow to repeat, or is not known."""
    call = failure.call
    if call is None or not failure.budget.allows_a_call:
        return None
    made = attempt.backward if call.backward else attempt.forward
    try:
        return made(failure.implementation, inputs, **{**call.keywords, **changes})
    except ImplementationError:
        return None


def _right(failure: Failure, outputs: Mapping[str, Tensor] | None) -> bool:
    """Every output is within its bound."""
    if outputs is None:
        return False
    known = {n: x for n, x in outputs.items() if n in failure.expected}
    return all(
        bool(within(x.double(), truth.value, truth.limit(limits(n, failure.inputs.case).lam)).all())
        for n, x in known.items()
        for truth in (failure.expected[n],)
    )


def unwritten(failure: Failure, name: str) -> Tensor | None:
    """Elements of o or lse that hold what their memory held before the call.

    The memory is filled with a number first; whether the allocator then hands it out is luck, hence several tries.
    """
    call = failure.call
    if call is None:
        return None
    first = call.outputs[name]
    bad = ~first.isfinite() if name == "o" else torch.ones_like(first, dtype=torch.bool)
    for fill in FILLS:
        if not failure.budget.allows_a_call:
            return None
        try:
            found = attempt.forward(failure.implementation, call.inputs, lse="lse" in call.outputs, fill=fill)
        except ImplementationError:
            return None
        stale = bad & (found[name] == fill)
        if stale.any():
            return bad if name == "o" else stale
    return None


def repeated(failure: Failure) -> str:
    """A sentence when the same call gives another answer."""
    second = _again(failure, failure.inputs)
    if second is None or all(_same(x, second[n]) for n, x in failure.outputs.items() if n in second):
        return ""
    now = "and that is right" if _right(failure, second) else "and wrong too"
    return (
        f"a second identical call gives another answer, {now}: a race, memory that is never written, or state between "
        "calls"
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def spoilt(failure: Failure) -> str:
    """A sentence when only a repeated backward of one graph is wrong."""
    call = failure.call
    if call is None or call.keywords.get("times", 1) == 1 or not _right(failure, _again(failure, call.inputs, times=1)):
        return ""
    return "the first backward of the graph is right, a later one is not: the backward spoils what was saved for it"


def positive_scale(failure: Failure) -> str:
    """A sentence when the answer is finite once the scale is positive."""
    case = failure.inputs.case
    if case.scale is None or case.scale > 0:
        return ""
    positive = failure.inputs.with_(case=replace(case, scale=abs(case.scale) or 1.0))
    same, found = (_again(failure, inputs) for inputs in (failure.inputs, positive))
    if same is None or found is None or same["o"].isfinite().all() or not found["o"].isfinite().all():
        return ""
    kind = "negative scale" if case.scale < 0 else "scale of 0"
    return (
        f"a {kind} gives NaN, a positive one of the same size does not: its root is taken, or scores are scaled after "
        "they were masked (-inf times it)"
    )


def surroundings(failure: Failure) -> str:
    """A sentence when the answer is right once the NaN between and behind the rows of q, k and v are zeros."""
    changed = {n: x for n in ("q", "k", "v") if (x := _cleaned(getattr(failure.inputs, n))) is not None}
    blamed = [n for n, x in changed.items() if _right(failure, _again(failure, failure.inputs.with_(**{n: x})))]
    if not blamed and len(changed) > 1 and _right(failure, _again(failure, failure.inputs.with_(**changed))):
        blamed = list(changed)
    if not blamed:
        return ""
    return (
        f"memory that belongs to no element of {' and '.join(blamed)} is read: NaN lies between or behind its rows, "
        "and with zeros there the answer is right (a load without a mask: NaN times 0 is NaN)"
    )


def _cleaned(x: Tensor) -> Tensor | None:
    """x with zeros for the NaN around its elements; None where there are none, or too much memory."""
    size = x.untyped_storage().nbytes() // x.element_size()
    if size > STORAGE:
        return None
    whole = x.as_strided((size,), (1,), 0)
    if not whole.isnan().any() or x.isnan().any():
        return None
    return whole.nan_to_num(nan=0.0).as_strided(x.shape, x.stride(), x.storage_offset())


def contiguous(failure: Failure) -> str:
    """A sentence when the answer is right with a contiguous copy of one of the tensors."""
    call = failure.call
    if call is None:
        return ""
    native = failure.implementation.convention.layout
    names = ("q", "k", "v", "dout") if call.backward else ("q", "k", "v")
    copies = {n: _plain(x, native) for n in names if not _is_plain(x := getattr(failure.inputs, n), native)}
    for name, copy in copies.items():
        if _right(failure, _again(failure, failure.inputs.with_(**{name: copy}))):
            shown = "dO" if name == "dout" else name
            return f"the answer is right with a contiguous copy of {shown}: {_fault(getattr(failure.inputs, name))}"
    if len(copies) > 1 and _right(failure, _again(failure, failure.inputs.with_(**copies))):
        return f"the answer is right when {', '.join(copies)} are contiguous: their strides are not honoured"
    return ""


def _plain(x: Tensor, native: str) -> Tensor:
    return place(x.clone(memory_format=torch.contiguous_format), "plain", native)


def _is_plain(x: Tensor, native: str) -> bool:
    ordered = x if native == "bhsd" else x.transpose(1, 2)
    return ordered.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size()


def _fault(x: Tensor) -> str:
    if any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
        return "its strides of 0 (it is expanded) are not honoured"
    if int(x.storage_offset()) * x.element_size() % 16:
        return "its base address, which is no multiple of 16 bytes, is misread"
    if x.stride(-1) != 1:
        return "its head dim is not its fastest axis, and that stride is not honoured"
    if (x.shape[0] - 1) * x.stride(0) >= FAR:
        return "its last batch element starts 2^31 elements behind the first, which 32-bit offsets cannot reach"
    return "its strides are not honoured"
