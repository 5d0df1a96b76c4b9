"""Grouped heads."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Output, log-sum-exp and gradients of grouped heads within their bounds."""
    flashattn_check("gqa.matches_oracle", flashattn_case)


def test_head_map(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Each kv head holds one constant value, so the output names the kv head that each query head read."""
    flashattn_check("gqa.head_map", flashattn_case)
