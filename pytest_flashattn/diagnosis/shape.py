"""What the error of one quantity says by itself: constant factors, zeros, NaN, tails."""

from __future__ import annotations

import math

from torch import Tensor

from ..localise import where
from .match import SHARE, Sample, within
from .model import LOG2E, Problem

CLOSE = 2e-3
"""Relative distance up to which a measured factor is given a name."""

SAME = 1e-4
"""A factor nearer to 1 is no finding."""

LEFT = 0.02
"""Of the squared error, the most that a factor may leave."""

TILES = (128, 64, 32, 16)
"""The largest first: a tail of 64 is one of 16 too."""


def place(name: str, wrong: Tensor) -> str:
    """Where the true elements of `wrong` lie; the rows of dk and dv are keys. Empty for all of them."""
    text = where(wrong).removeprefix("where: ")
    if not text or text.startswith("everywhere"):
        return ""
    return text.replace("row", "key") if name in ("dk", "dv") else text


def _at(name: str, wrong: Tensor) -> str:
    text = place(name, wrong)
    return f" in {text}" if text else " everywhere"


def tail(wrong: Tensor) -> str:
    """A clause when the wrong rows are exactly those after the last multiple of a tile size."""
    if wrong.dim() < 3:
        return ""
    rows = wrong.any(-1) if wrong.dim() == 4 else wrong
    hit = rows.any(0).any(0)
    length = len(hit)
    for tile in TILES:
        start = length // tile * tile
        if 0 < start < length and hit[start:].all() and not hit[:start].any():
            return f"the partial tile after the last multiple of {tile}"
    return ""


def factors(p: Problem) -> dict[str, float]:
    """Factors that have a name for this problem."""
    named = {
        "ln 2": 1 / LOG2E,
        "log2(e)": LOG2E,
        "the scale": p.scale,
        "1 / scale": 1 / p.scale if p.scale else 0.0,
        "scale^2": p.scale**2,
        "e": math.e,
        "1 / e": 1 / math.e,
        "the size of the group": float(p.group),
        "1 / group": 1 / p.group,
        "D": float(p.q.shape[-1]),
        "Dv": float(p.v.shape[-1]),
        "the number of keys": float(p.lk),
        "1 / keys": 1 / max(p.lk, 1),
    }
    return {name: value for name, value in named.items() if value and abs(value - 1) > CLOSE}


def _named(p: Problem, c: float) -> str:
    if abs(c - 2) < CLOSE:
        return "2 x the truth: it is added up twice, or on top of what was there"
    for name, value in factors(p).items():
        if abs(c - value) <= CLOSE * abs(value):
            return f"{c:.4g} x the truth, which is {name}"
    return f"{c:.4g} x the truth"


def whole_factor(p: Problem, sample: Sample) -> str:
    """A sentence when the wrong part is the truth times one number: 0, the scale, 2, …"""
    rows = sample.wrong_rows
    got, want, limit = sample.got[rows].flatten(), sample.want[rows].flatten(), sample.limit[rows].flatten()
    if not got.isfinite().all() or not want.isfinite().all() or not want.square().sum():
        return ""
    c = float((got @ want) / (want @ want))
    if abs(c - 1) < SAME or not within(got, c * want, limit * max(1.0, abs(c)) + 1e-2 * abs(c) * want.abs()).all():
        return ""
    if float((got - c * want).square().sum()) > LEFT * float((got - want).square().sum()):
        return ""
    wrong = _spread(rows, sample.got)
    at = _at(sample.name, wrong)
    if (got == 0).all():
        end = tail(wrong)
        return f"{sample.name}{at} is 0" + (f": {end} is lost" if end else "")
    return f"{sample.name}{at} is {_named(p, c)}"


def _spread(rows: Tensor, like: Tensor) -> Tensor:
    return rows[..., None].expand(like.shape) if rows.dim() < like.dim() else rows


def row_factors(sample: Sample) -> str:
    """A sentence when each wrong row is the truth times a number of its own."""
    rows = sample.wrong_rows
    if sample.got.dim() != 4 or sample.got.shape[-1] < 4 or int(rows.sum()) < 2:
        return ""
    got, want, limit = sample.got[rows], sample.want[rows], sample.limit[rows]
    size = want.square().sum(-1)
    if not got.isfinite().all() or not bool((size > 0).all()):
        return ""
    c = (got * want).sum(-1) / size
    left = got - c[:, None] * want
    explained = 1 - float(left.square().sum() / (got - want).square().sum())
    if explained < SHARE or not within(got, c[:, None] * want, 1.5 * limit * c.abs().clamp_min(1)[:, None]).all():
        return ""
    low, high = float(c.min()), float(c.max())
    return (
        f"each row of {sample.name} is the truth times a factor of its own ({low:.5g} to {high:.5g}): the denominator "
        "of the softmax is wrong or imprecise, not the weights"
    )


def not_finite(sample: Sample) -> str:
    """Where NaN or inf lie."""
    bad = ~sample.got.isfinite() & sample.want.isfinite()
    if not bad.any():
        return ""
    word = "NaN" if sample.got[bad].isnan().any() else "infinite"
    return f"{sample.name} is {word}{_at(sample.name, bad)}"


def tail_only(sample: Sample) -> str:
    """The last resort: that all wrong elements lie in a partial tile."""
    end = tail(sample.wrong)
    return f"{sample.name} is wrong only in {end}" if end else ""
