"""Does an alternative match what was returned, how tightly, and which of several matches is told."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SHARE = 0.9
"""Of the squared error, from which on an alternative that does not match every element is told all the same."""

ROWS = 0.8
"""Of the wrong rows, the least that must come out nearer: a few large rows make up most of an error."""

EXACT_SHARE = 0.75
"""A match of every element that explains less of the error differs from the truth by hardly more than the bound."""

TIE = 1.15
"""Two matches whose distances differ by less are equally tight: the order of the tables decides."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One quantity as returned: got, want, limit float64 of one shape; `name` as the user reads it ("o", "dk")."""

    name: str
    got: Tensor
    want: Tensor
    limit: Tensor

    @property
    def wrong(self) -> Tensor:
        return ~within(self.got, self.want, self.limit)

    @property
    def wrong_rows(self) -> Tensor:
        """The rows with a wrong element; tensors of one axis have rows of one element."""
        wrong = self.wrong
        return wrong.any(-1) if wrong.dim() > 3 else wrong

    @property
    def error(self) -> Tensor:
        return self.got - self.want


@dataclass(frozen=True)
class Match:
    """exact: every element of the wrong rows is within the bound of the alternative, and not all are within that of the
    truth. whole: those of all rows are.

    share: of the squared error that is explained. rows: share of the wrong rows that come out nearer.
    distance: RMS distance of the wrong rows, in units of the bound. kept: share of the elements that match, right and
    wrong ones.
    """

    exact: bool
    whole: bool
    share: float
    distance: float
    rows: float = 1.0
    kept: float = 1.0

    @property
    def told(self) -> bool:
        return (self.exact and self.share >= EXACT_SHARE) or (self.share >= SHARE and self.rows >= ROWS)

    @property
    def level(self) -> int:
        return 2 * (self.exact and self.whole) + self.exact

    def how(self, name: str) -> str:
        """What is known of the match, as the end of a sentence."""
        if self.exact and self.whole:
            return f"{name} matches that everywhere"
        if self.exact:
            return f"the wrong rows of {name} match that"
        return f"explains {math.floor(1000 * self.share) / 10:g} % of the error of {name}"


def within(got: Tensor, want: Tensor, limit: Tensor) -> Tensor:
    """Equal up to `limit`; NaN only to NaN, infinities only to their like."""
    same = (got == want) | (got.isnan() & want.isnan())
    finite = got.isfinite() & want.isfinite()
    return same | (finite & ((got - want).abs() <= limit))


def compare(sample: Sample, value: Tensor, extra: Tensor) -> Match | None:
    """How `value`, in the shape of the sample, matches what was returned; `extra`: its rounding, added to the limit.

    None when there is nothing to explain.
    """
    rows = sample.wrong_rows
    if not rows.any() or value.shape != sample.want.shape:
        return None
    limit = sample.limit + extra.nan_to_num(nan=0.0)
    agrees = within(sample.got, value, limit)
    agrees_rows = agrees.all(-1) if agrees.dim() > 3 else agrees
    got, want, alternative, bound = (x[rows].flatten() for x in (sample.got, sample.want, value, limit))
    distinct = not bool(within(alternative, want, bound).all())
    odd = ~got.isfinite() | ~alternative.isfinite()
    if odd.any():
        # What is not finite has no size: the share is that of the elements.
        share, nearer = float((agrees[rows].flatten() & odd).sum() / odd.sum()), 1.0
    else:
        before, after = ((sample.got - x)[rows].square() for x in (sample.want, value))
        share = 1.0 - float(after.sum() / before.sum())
        nearer = 1.0
        if after.dim() > 1:
            nearer = float((after.flatten(1).sum(1) < 0.5 * before.flatten(1).sum(1)).double().mean())
    off = ((got - alternative).abs() / bound.clamp_min(1e-300)).nan_to_num(nan=0.0, posinf=0.0).clamp_max(100)
    distance = float(off.square().mean().sqrt())
    exact = distinct and bool(agrees_rows[rows].all())
    return Match(exact, bool(agrees.all()), share, distance, nearer, float(agrees.double().mean()))


@dataclass(frozen=True)
class Finding:
    """A sentence about a failure, and how well it is founded. agrees: other quantities match it as well."""

    sentence: str
    match: Match
    agrees: bool = True

    @property
    def rank(self) -> tuple[int, bool]:
        return self.match.level, self.agrees


def tightest(findings: list[Finding]) -> list[Finding]:
    """The best founded, and another one that is as tight, if there is one.

    Ties: first what spoils the fewest right elements, then the order of the tables.
    """
    told = [f for f in findings if f.match.told]
    if not told:
        return []
    best = max(f.rank for f in told)
    told = [f for f in told if f.rank == best]
    if not best[0]:
        top = max(f.match.share for f in told)
        told = [f for f in told if 1 - f.match.share <= TIE * (1 - top) + 1e-3]
    else:
        least = min(f.match.distance for f in told)
        told = [f for f in told if f.match.distance <= TIE * least + 1e-3]
    first: dict[str, Finding] = {}
    for finding in sorted(told, key=lambda f: round(f.match.kept, 2), reverse=True):
        first.setdefault(finding.sentence, finding)
    return list(first.values())[:2]


def sized(x: Tensor) -> Tensor:
    """RMS over the last axis, kept; 0 where nothing is finite."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).square().mean(-1, keepdim=True).sqrt()
