"""The log-sum-exp and the gradient through it."""

from __future__ import annotations

from ..cases import Case
from ..fixtures import RunCheck


def test_matches_oracle(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Output and natural log-sum-exp within their bounds; -inf on rows that see no key."""
    flashattn_check("lse.matches_oracle", flashattn_case)


def test_gradient_flows_through_lse(flashattn_check: RunCheck, flashattn_case: Case) -> None:
    """Gradients of a loss that uses both the output and the log-sum-exp."""
    flashattn_check("lse.gradient_flows_through_lse", flashattn_case)
