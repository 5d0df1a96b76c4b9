"""Explain a wrong o or lse: all tables of alternatives, compared on a sample of query rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from . import (
    forward_fp8,
    forward_keys,
    forward_mask,
    forward_memory,
    forward_options,
    forward_output,
    forward_scores,
    forward_softmax,
)
from .alternative import Alternative, Family
from .budget import Budget
from .match import Finding, Sample, compare, sized, within
from .model import Problem, Values, forward

TABLES: tuple[tuple[Alternative, ...], ...] = (
    forward_output.ALTERNATIVES[:1],
    forward_mask.ALTERNATIVES,
    forward_scores.ALTERNATIVES,
    forward_options.ALTERNATIVES,
    forward_output.ALTERNATIVES[1:],
)
FAMILIES: tuple[Family, ...] = (
    *forward_memory.FAMILIES[:1],
    *forward_mask.FAMILIES,
    *forward_scores.FAMILIES,
    *forward_options.FAMILIES,
    *forward_softmax.FAMILIES[:2],
    *forward_keys.FAMILIES,
    *forward_softmax.FAMILIES[2:],
    *forward_output.FAMILIES,
    *forward_memory.FAMILIES[1:],
)

U_ACC = 2.0**-24


@dataclass(frozen=True, eq=False)
class Noise:
    """Roundoffs by which an alternative's own values may differ from a kernel that computes it."""

    u_out: float
    u_p: float
    row: Tensor
    """(B, Hq, n, 1): relative error of a row's P from fp32 scores."""

    def of(self, p: Problem, out: Values, *, moved: bool = False) -> Tensor:
        """The rounding of an alternative's o, (B, Hq, n, Dv); moved: rows lie where others belong."""
        spread = (out.p.nan_to_num(0.0, 0.0, 0.0).square() @ p.v[:, p.heads].square().nan_to_num()).sqrt()
        if moved:
            spread = spread.amax((1, 2), keepdim=True)
        return 2 * self.u_out * (out.o.abs() + sized(out.o)) + 3 * (self.u_p + self.row) * spread

    def of_lse(self, lse: Tensor) -> Tensor:
        return 4 * U_ACC * lse.abs() + 3 * self.row.squeeze(-1)


def noise_of(p: Problem, u_out: float, u_p: float) -> Noise:
    """Scores are products of length D in fp32, as large as their absolute sum."""
    size = abs(p.scale) * (p.q.abs() @ p.k[:, p.heads].abs().mT)
    largest = size.amax(-1, keepdim=True) if p.lk else p.q.new_zeros(*p.q.shape[:3], 1)
    return Noise(u_out, u_p, U_ACC * ((p.q.shape[-1] ** 0.5 + 2) * largest + 4))


def alternatives(p: Problem) -> Iterator[Alternative]:
    """Everything the tables hold for this problem, the likelier first."""
    yield from forward_fp8.descales(p)
    for table in TABLES:
        yield from (a for a in table if a.when(p))
    for family in FAMILIES:
        yield from family(p)


@dataclass(frozen=True, eq=False)
class Trial:
    """What alternatives are compared with: the problem and its o, the same on a few rows (screen), and lse if known."""

    problem: Problem
    sample: Sample
    screen: tuple[Problem, Sample]
    lse: Sample | None
    noise: Noise
    budget: Budget

    def findings(self, candidates: Iterable[Alternative]) -> list[Finding]:
        """Which candidates match, as far as the budget goes; lse tells equal matches apart."""
        found = []
        for candidate in candidates:
            if self.budget.spent:
                break
            finding = self._finding(candidate)
            if finding is not None:
                found.append(finding)
        return found

    def _finding(self, candidate: Alternative) -> Finding | None:
        few, of_few = self.screen
        if few is not self.problem and not candidate.whole and not promising(of_few, forward(candidate.change(few)).o):
            return None
        changed = candidate.change(self.problem)
        out = forward(changed)
        if not promising(self.sample, out.o):
            return None
        match = compare(self.sample, out.o, self.noise.of(changed, out, moved=candidate.whole))
        if match is None or not match.told or (candidate.exact_only and not match.exact):
            return None
        lse = self.lse
        agrees = lse is None or bool(within(lse.got, out.lse, lse.limit + self.noise.of_lse(out.lse)).all())
        return Finding(candidate.sentence, match, agrees)


def promising(sample: Sample, value: Tensor) -> bool:
    """Whether a value may match at all: it explains half of the error, or is not finite where that is not."""
    rows = sample.wrong_rows
    got, want, other = sample.got[rows], sample.want[rows], value[rows]
    if not (got.isfinite().all() and other.isfinite().all()):
        return bool((got.isfinite() == other.isfinite()).float().mean() > 0.5)
    return bool((got - other).square().sum() < 0.5 * (got - want).square().sum())
