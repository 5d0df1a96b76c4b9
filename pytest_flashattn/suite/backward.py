"""Dq, dk and dv, as strictly as the output."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """dq, dk and dv within their bounds, in every layout of dO."""
    flashattn_check("backward.matches_oracle", flashattn_case)


def test_zero_dout_gives_zero_gradients(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """With dO = 0 every gradient is exactly zero."""
    flashattn_check("backward.zero_dout_gives_zero_gradients", flashattn_case)


def test_gradient_of_one_input(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """The gradient of q, k or v alone, the others being constants."""
    flashattn_check("backward.gradient_of_one_input", flashattn_case)
