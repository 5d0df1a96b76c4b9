"""Closed forms and inputs that are not Gaussian."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Structured inputs: offsets on all logits, peaks, ramps, outliers, constants, zero rows, negative scale."""
    flashattn_check("numerics.matches_oracle", flashattn_case)


def test_one_key(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """A softmax over one key is 1: the output is its value (16 bits: to the bit), dq and dk vanish against dv."""
    flashattn_check("numerics.one_key", flashattn_case)


def test_uniform_scores(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """All visible keys weigh the same: lse is log n plus the common score, the output the mean of the values."""
    flashattn_check("numerics.uniform_scores", flashattn_case)
