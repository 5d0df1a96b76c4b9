"""Explain wrong gradients of a right forward: tables of wrong backwards, compared on all gradients at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .backward_families import FAMILIES
from .backward_model import Gradients, Tape, gradients
from .backward_tables import TABLE, Wrong
from .budget import Budget
from .match import Finding, Match, Sample, compare, sized, within

ROUNDOFF = {"bf16": 2.0**-6, "fp16": 2.0**-9, "fp32": 2.0**-18}
"""Relative error of a gradient whose own bound is not known: four roundings of P or dS and of the output."""


LARGER = 30.0
"""How many times as wide as the truth's the bound of a larger gradient becomes, at most."""


def wrongs(tape: Tape) -> Iterator[Wrong]:
    yield from (w for w in TABLE if w.when(tape))
    for family in FAMILIES:
        yield from family(tape)


def try_all(tape: Tape, samples: Mapping[str, Sample], budget: Budget) -> list[Finding]:
    """What matches all gradients. Stops when the budget is spent, or all is explained."""
    found = []
    at = worst(tape, samples)
    for wrong in wrongs(tape):
        if budget.spent:
            break
        changed = wrong.change(tape)
        if at is not None and not promising(tape, changed, samples, at):
            continue
        finding = judged(wrong, gradients(changed), samples, tape.problem.case.dtype)
        if finding is not None and (finding.match.level == 3 or not wrong.exact_only):
            found.append(finding)
            if finding.match.level == 3 and finding.match.share > 0.99 and not _nan(samples):
                break
    fitted = delta_factor(tape, samples)
    return found + ([fitted] if fitted else [])


def _nan(samples: Mapping[str, Sample]) -> bool:
    return any(not s.got.isfinite().all() for s in samples.values())


def rounding_of(sample: Sample, value: Tensor, dtype: str) -> Tensor:
    """How much wider than the truth's the bound of another gradient is: as much as its rows are larger."""
    larger = (sized(value) / sized(sample.want).clamp_min(1e-300)).clamp(1, LARGER)
    return sample.limit * (larger - 1) + ROUNDOFF[dtype] * (value.abs() + sized(value))


def worst(tape: Tape, samples: Mapping[str, Sample]) -> tuple[int, int] | None:
    """The batch element and kv head with the largest error of dk, dv or dq; None when there is only one, or NaN."""
    p = tape.problem
    shares = [n for n in ("dk", "dv", "dq") if n in samples and samples[n].wrong.any()]
    if p.q.shape[0] * p.k.shape[1] < 2 or not shares or _nan(samples):
        return None
    error = samples[shares[0]].error.square().sum((-1, -2))
    if shares[0] == "dq":
        error = error.unflatten(1, (p.k.shape[1], p.group)).sum(2)
    at = int(error.argmax())
    return at // p.k.shape[1], at % p.k.shape[1]


def promising(right: Tape, tape: Tape, samples: Mapping[str, Sample], at: tuple[int, int]) -> bool:
    """Whether half of the error of one kv head is explained; True where that cannot be told from one head."""
    p = tape.problem
    if tape.finish is not right.finish or p.heads is not right.problem.heads:
        return True
    b, g = at
    found = gradients(of_head(tape, b, g))
    heads = slice(g * p.group, (g + 1) * p.group)
    before = after = 0.0
    for name, part in (("dq", heads), ("dk", slice(g, g + 1)), ("dv", slice(g, g + 1))):
        if name in samples and samples[name].wrong.any():
            got, want = (x[b : b + 1, part] for x in (samples[name].got, samples[name].want))
            before += float(
                ((got - want).square() / samples[name].limit[b : b + 1, part].square().clamp_min(1e-60)).sum()
            )
            after += float(
                ((got - found[name]).square() / samples[name].limit[b : b + 1, part].square().clamp_min(1e-60)).sum()
            )
    return not after > 0.5 * before


def of_head(tape: Tape, b: int, g: int) -> Tape:
    """The tape of one batch element and one kv head with its query heads."""
    p = tape.problem
    batch, kv, heads = slice(b, b + 1), slice(g, g + 1), slice(g * p.group, (g + 1) * p.group)

    def cut(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x if x.shape[0] == 1 else x[batch]
        return x if x.shape[1] == 1 else x[:, heads]

    one = replace(
        p,
        q=p.q[batch, heads],
        k=p.k[batch, kv],
        v=p.v[batch, kv],
        heads=torch.zeros_like(p.heads[heads]),
        slopes=None if p.slopes is None else p.slopes[heads],
        sinks=None if p.sinks is None else p.sinks[heads],
        bias=cut(p.bias),
        mask=cut(p.mask),
        known=[],
    )
    return replace(
        tape,
        problem=one,
        o=tape.o[batch, heads],
        lse=tape.lse[batch, heads],
        do=tape.do[batch, heads],
        dlse=None if tape.dlse is None else tape.dlse[batch, heads],
        delta=None if tape.delta is None else tape.delta[batch, heads],
        wanted=frozenset(),
    )


def judged(wrong: Wrong, values: Gradients, samples: Mapping[str, Sample], dtype: str) -> Finding | None:
    """One finding for all gradients together: those that are wrong must be explained, the others stay as they were."""
    matches: list[Match] = []
    agrees = True
    for name, sample in samples.items():
        value = values[name]
        if value.shape != sample.want.shape:
            return None
        extra = rounding_of(sample, value, dtype)
        if wrong.moves is not None:
            extra = extra + wrong.moves(name, sample.limit)
        if sample.wrong.any():
            match = compare(sample, value, extra)
            if match is None:
                return None
            matches.append(match)
        else:
            agrees &= bool(within(sample.got, value, sample.limit + extra).all())
    if not matches or not agrees:
        return None  # the alternative would have spoilt a gradient that is right
    whole = Match(
        all(m.exact for m in matches),
        all(m.whole for m in matches),
        min(m.share for m in matches),
        math.sqrt(sum(m.distance**2 for m in matches) / len(matches)),
    )
    return Finding(wrong.sentence, whole) if whole.told else None


def delta_factor(tape: Tape, samples: Mapping[str, Sample]) -> Finding | None:
    """Gradients are linear in Delta: the factor of it that fits best, if it fits."""
    if "dq" not in samples or not samples["dq"].wrong.any() or _nan(samples):
        return None
    without = gradients(replace(tape, times_delta=0.0))["dq"]
    part = samples["dq"].want - without
    size = float(part.square().sum())
    if not size:
        return None
    factor = float(((samples["dq"].got - without) * part).sum()) / size
    if abs(factor) < 0.02 or abs(factor - 1) < 1e-4:
        return None
    sentence = f"Delta = sum(dO * O) is {factor:.4g} x what it should be"
    fitted = Wrong(sentence, lambda t: replace(t, times_delta=factor))
    return judged(fitted, gradients(fitted.change(tape)), samples, tape.problem.case.dtype)
