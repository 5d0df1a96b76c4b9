"""What the calls that a check made before say about the one that failed: stale answers, state, options that stick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..inputs import Inputs
from .alternative import Alternative
from .model import Problem, banded
from .notebook import Call

OPTIONS = ("causal", "window", "scale", "softcap")


def _bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())


def stale(calls: list[Call], call: Call | None, got: Tensor) -> str:
    """A sentence when an earlier call of the check, on other numbers, gave this very answer."""
    earlier = [c for c in calls if c is not call]
    if call is None or not got.numel() or not got.isfinite().all() or bool((got == got.flatten()[0]).all()):
        return ""  # zeros, or NaN, say nothing of where they come from
    if any(_bits(c.outputs["o"], got) and not _same_arguments(c, call.inputs) for c in earlier):
        return (
            "o is, to the last bit, the answer to an earlier call on other numbers: a remembered result, looked up by "
            "identity, address or shape"
        )
    return ""


def _same_arguments(call: Call, inputs: Inputs) -> bool:
    """The earlier call had these arguments: equal numbers, which it has kept, and equal options."""
    if not call.unchanged:
        return False
    a, b = call.inputs, inputs
    return _options(a) == _options(b) and all(
        x.shape == y.shape and torch.equal(x, y) for x, y in ((a.q, b.q), (a.k, b.k), (a.v, b.v))
    )


def _options(inputs: Inputs) -> tuple[Any, ...]:
    return tuple(getattr(inputs.case, name) for name in OPTIONS)


def contradicted(calls: list[Call], call: Call | None, outputs: Mapping[str, Tensor]) -> str:
    """A sentence when the same arguments gave another o in an earlier call of the check."""
    for earlier in calls:
        if call is None or earlier is call or earlier.backward != call.backward:
            continue  # a forward that saves nothing for a backward may well take another path
        if _same_arguments(earlier, call.inputs) and not _bits(earlier.outputs["o"], outputs["o"]):
            return (
                "the same arguments gave another o in an earlier call: the answer depends on how often, or after what, "
                "it is called"
            )
    return ""


def sticky(calls: list[Call], call: Call | None) -> list[Alternative]:
    """The options of the call before, where they differ from this one's."""
    at = next((n for n, c in enumerate(calls) if c is call), 0)
    if not at:
        return []
    before, now = calls[at - 1].inputs.case, calls[at].inputs.case
    names = [n for n in OPTIONS if getattr(before, n) != getattr(now, n)]
    if not names:
        return []
    said = ", ".join(f"{n}={getattr(before, n)}" for n in names)
    left, right = before.window or (None, None)
    if before.causal:
        right = 0 if right is None else min(right, 0)

    def change(p: Problem) -> Problem:
        scale = p.q.shape[-1] ** -0.5 if before.scale is None else before.scale
        return replace(banded(p, left, right), scale=scale, softcap=before.softcap)

    return [Alternative("sticky-options", f"the options of the call before still apply: {said}", change)]
