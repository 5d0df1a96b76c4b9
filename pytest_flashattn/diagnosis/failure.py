"""One failure: what was received, returned and expected, and the parts of it that are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import oracles

from .. import examination
from ..implementation import Implementation
from ..inputs import TORCH_DTYPES, Inputs, output_dtype
from ..tolerances import limits
from . import rounding
from .budget import Budget
from .match import Finding, Sample
from .model import Problem, pose
from .notebook import Call, Notebook

SAMPLED_SCORES = 2**18
"""Score elements that one alternative computes, at most, but for the least number of rows."""

LEAST_ROWS = 16

SCREENED = 8
"""Query rows on which an alternative must look promising before it is compared on all."""

LOOKS = "looks like: "


@dataclass(frozen=True, eq=False)
class Failure:
    """rows: those that were judged. call: the one that gave the outputs; None when it was too large to keep."""

    notebook: Notebook
    inputs: Inputs
    outputs: Mapping[str, Tensor]
    expected: Mapping[str, oracles.Truth]
    rows: slice
    call: Call | None
    budget: Budget

    @property
    def implementation(self) -> Implementation:
        return self.notebook.implementation

    @property
    def dtype(self) -> torch.dtype:
        """Of the output."""
        return output_dtype(self.inputs.case)

    @property
    def calls(self) -> list[Call]:
        """The last calls of the checks before and those of this one, oldest first."""
        return [*self.notebook.memory.calls, *self.notebook.calls]

    def sample(self, name: str, rows: Tensor | None = None) -> Sample:
        """One quantity, of these query rows."""
        truth = self.expected[name]
        limit = truth.limit(limits(name, self.inputs.case).lam)
        parts = (self.outputs[name].double(), truth.value, limit)
        return Sample(name, *(parts if rows is None else (x[:, :, rows] for x in parts)))

    def problem(self, rows: Tensor | None = None) -> Problem:
        """The right problem, of these query rows (None: all)."""
        if rows is None:
            rows = torch.arange(self.inputs.q.shape[2], device=self.inputs.q.device)
        return pose(self.inputs, self.implementation.support.alignment, rows)

    def sampled(self) -> tuple[Problem, Sample]:
        """The problem and its o on a sample of the judged query rows, the wrong ones first."""
        b, hq, lq, _ = self.inputs.q.shape
        judged = torch.zeros(lq, dtype=torch.bool, device=self.inputs.q.device)
        judged[self.rows] = True
        most = max(LEAST_ROWS, SAMPLED_SCORES // max(b * hq * self.inputs.k.shape[2], 1))
        rows = _spread(self.sample("o").wrong_rows & judged, most)
        rows = rows[judged[rows]]
        return self.problem(rows), self.sample("o", rows)

    def screen(self, problem: Problem, sample: Sample) -> tuple[Problem, Sample]:
        """The same on the few rows with most wrong elements, to try alternatives on."""
        if len(problem.rows) <= 2 * SCREENED:
            return problem, sample
        count = sample.wrong.sum((0, 1, 3))
        rows = problem.rows[count.argsort(descending=True)[:SCREENED]].sort().values
        return self.problem(rows), self.sample("o", rows)

    def honest_p(self) -> rounding.Round | None:
        """How P is to be rounded, where inputs are FP8."""
        support, case = self.implementation.support, self.inputs.case
        if case.descale is None:
            return None
        dtype = TORCH_DTYPES[support.p_dtype or case.dtype]
        return rounding.scaled(dtype, support.p_scale if dtype.itemsize == 1 else 1.0)

    def arithmetic(self) -> oracles.Arithmetic:
        return examination.arithmetic(self.implementation.support, self.inputs.case)


def _spread(wrong_rows: Tensor, most: int) -> Tensor:
    """Up to `most` query rows (n,): half those with most wrong elements, half an even spread."""
    lq = wrong_rows.shape[2]
    if lq <= most:
        return torch.arange(lq, device=wrong_rows.device)
    worst = wrong_rows.sum((0, 1)).argsort(descending=True)[: most // 2]
    spread = torch.linspace(0, lq - 1, most // 2, device=wrong_rows.device).long()
    rows: Tensor = torch.cat([worst, spread]).unique()
    return rows


def told(findings: list[Finding], name: str) -> list[str]:
    """The lines of the report for these findings on `name`."""
    return [f"{LOOKS}{f.sentence} ({f.match.how(name)})" for f in findings]
