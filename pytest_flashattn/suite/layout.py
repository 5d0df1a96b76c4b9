"""Strides, offsets, expanded and fused memory."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Output, log-sum-exp and gradients within their bounds."""
    flashattn_check("layout.matches_oracle", flashattn_case)
